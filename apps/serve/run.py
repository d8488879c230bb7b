"""Start a server from its configuration, run it, and shut it down."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.run.output import wall_clock
from edgevlm.apps.run.process import Notifier
from edgevlm.apps.schemas import json_line
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.guard import Guard
from edgevlm.apps.serve.http import close_listeners, make_app
from edgevlm.apps.serve.service import Service
from edgevlm.errors import UserError
from edgevlm.progress import Notify, progress, silence, to_stderr, to_stderr_if_lost

HEAD_S = 20.0
MAX_HEADERS = 64 << 10
MAX_DIGITS = 640  # maximum digits of an integer in a body; the parsing time grows with the square of the digits
READ_S = 20.0
RESERVE = 128  # file descriptors reserved for cameras and state, but at most a quarter of the process's limit
WAITING = 1024
ALIVE_S = 1.0


class Membership(Protocol):
    def open(self) -> None: ...
    def routes(self, app: FastAPI) -> Any: ...
    def close(self) -> None: ...


def serve(load: Callable[[], ServeConfig], as_json: bool, quiet: bool, join: Callable[..., Membership] | None = None) -> None:
    """Serve until a signal arrives. ``join`` adds the service to a cluster. Raises UserError."""
    sys.set_int_max_str_digits(MAX_DIGITS)
    config, notify = load(), to_stderr_if_lost if quiet else to_stderr
    service = Service(config, notify)
    listening = bound(config.server.host, config.server.port)
    member = None if join is None else join(service, listening.getsockname()[1], notify)
    serving, done = threading.Event(), threading.Event()
    reporter = threading.Thread(target=report, args=(service, serving, done), name="edgevlm-alive", daemon=True)
    reporter.start()
    host, port = listening.getsockname()[:2]
    service.page = url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        with progress("opening the cameras"):
            (service if member is None else member).open()
        app = make_app(service, load)

        class AnnouncingServer(uvicorn.Server):
            """A server that prints its address when it is ready, reloads on SIGHUP, and ends streamed responses on shutdown."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                gc.collect()
                gc.freeze()  # otherwise a full garbage collection stops all requests for 50 to 100 ms
                listening.listen(WAITING)
                loop = asyncio.get_running_loop()
                with suppress(ValueError, RuntimeError):  # this is not the main thread
                    loop.add_signal_handler(signal.SIGHUP, loop.run_in_executor, reloads, reload, service, load, notify)
                line = json_line("serving", {"time": wall_clock(), "url": url})
                try:
                    print(line if as_json else f"edgevlm is serving at {url}", flush=True)
                except OSError:  # the disk is full or nothing reads stdout; keep serving
                    silence(sys.stdout)
                serving.set()

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await close_listeners(app.state.server)
                await super().shutdown(sockets)

        AppStatus.enable_automatic_graceful_drain = False  # close_listeners ends responses cleanly
        reloads = ThreadPoolExecutor(1, "edgevlm-reload")
        server = AnnouncingServer(uvicorn_config(app if member is None else member.routes(app), service))
        with suppress(KeyboardInterrupt):  # uvicorn re-raises the signal that ended it
            server.run(sockets=[listening])
    finally:
        done.set()
        serving.set()  # the reporter may still wait for the server to start
        reporter.join(ALIVE_S)
        Notifier().send(Notifier.STOPPING)
        listening.close()
        if member is not None:
            member.close()
        service.close()


def uvicorn_config(app: Any, service: Service) -> uvicorn.Config:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserve = min(RESERVE, files // 4)
    TimedProtocol.most = files - reserve
    return uvicorn.Config(
        Guard(app, service), log_config=None, log_level=logging.ERROR, access_log=False, server_header=False,
        limit_concurrency=service.config.server.max_connections, timeout_graceful_shutdown=1, proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADERS, lifespan="off", http=TimedProtocol, ws="none",
        backlog=reserve // 2,
    )  # fmt: skip


class TimedProtocol(H11Protocol):
    """Closes a connection that is idle for HEAD_S seconds, or whose client does not read for READ_S seconds.

    ``most``: the largest number of open files. If a new connection exceeds this number, the oldest idle connection is closed.
    """

    most: float = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made = self.loop.time()
        if open_files() > self.most:
            idle = [each for each in self.connections if isinstance(each, TimedProtocol) and each.is_idle]
            min(idle, key=lambda each: each.made).transport.abort()
        self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)

    @property
    def is_idle(self) -> bool:
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stuck.cancel()

    def _close_if_idle(self, before: object) -> None:
        if self.cycle is before and self.is_idle:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)


def open_files() -> float:
    """Return the number of this process's open file descriptors, or infinity if they cannot be counted."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return math.inf


def reload(service: Service, load: Callable[[], ServeConfig], notify: Notify) -> None:
    """Read and apply the configuration; if the configuration is invalid, report the error and change nothing."""
    try:
        for line in service.reload(load()):
            notify(line)
    except UserError as error:
        notify(f"reload: {mask_credentials(str(error))}")


def report(service: Service, serving: threading.Event, done: threading.Event) -> None:
    """Tell the service manager when the server is ready and that its streams are alive, and reopen cameras after errors."""
    notifier, before = Notifier(), dict[str, tuple[int, int]]()
    while not serving.wait(ALIVE_S):
        notifier.send(Notifier.STARTING)
    if not done.is_set():
        notifier.send(Notifier.READY)
    while not done.is_set():
        service.reopen_torn()
        frames = sum(stream.session.stats.frames for stream in list(service.streams.values()))
        notifier.send(f"STATUS={len(service.streams)} streams, {frames:,} frames")
        signs = service.signs_of_life()
        if all(sign != before.get(name) for name, sign in signs.items()):
            notifier.send(Notifier.ALIVE)
            before = signs
        done.wait(ALIVE_S)


def bound(host: str, port: int) -> socket.socket:
    """Open a listening socket before models load, so that no other server takes the port. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)  # asyncio turns off Nagle's delay only if the protocol is TCP
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: {error.strerror or error}; choose another address or port (0 picks a free port)"
        ) from None
    return listening

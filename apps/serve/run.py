"""From options to a running server, and to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import psutil
import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.run.output import wall_clock
from edgevlm.apps.run.process import START_S, Notifier
from edgevlm.apps.schemas import json_line
from edgevlm.apps.serve.config import ServeConfig, assign, check_config, named_cameras, read_config
from edgevlm.apps.serve.guard import Guard
from edgevlm.apps.serve.http import close_listeners, make_app
from edgevlm.apps.serve.service import Service
from edgevlm.errors import UserError
from edgevlm.progress import Notify, progress, to_stderr

HEAD_S = 20.0  # that a request may take to come, without its body
MAX_HEADERS = 64 << 10  # bytes
READ_S = 20.0  # that a client may leave unread what was sent to it
IDLE_S = 0.01  # processor time between two signs that is no work
ALIVE_S = 1.0  # from one sign of life to the next, for a service manager


def settings_of(
    path: Path | None,
    cameras: list[str],
    shared: dict[str, Any],
    server: dict[str, Any],
    assigned: Sequence[str] = (),
    cluster: str | None = None,
) -> ServeConfig:
    """The file's settings, and over them those of the command line: ``assigned``, KEY=VALUE each, then options.

    Raises UserError.
    """
    values = read_config(path).model_dump(exclude_unset=True) if path is not None else {}
    for each in assigned:
        assign(values, each)
    for table in ("server", "cluster", "cameras"):
        if not isinstance(values.get(table, {}), dict):
            raise UserError(f"--set {table}: is a table; give {table}.KEY=VALUE")
    values |= {name: value for name, value in shared.items() if value is not None}
    values["server"] = {**values.get("server", {}), **{name: value for name, value in server.items() if value is not None}}
    if cluster is not None:
        values["cluster"] = {**values.get("cluster", {}), "join": cluster}
    if cameras:
        values["cameras"] = {**values.get("cameras", {}), **{k: v.model_dump() for k, v in named_cameras(cameras).items()}}
    if not values.get("cameras") and values.get("cluster", {}).get("join") is None:
        values["cameras"] = {"demo": {"source": "demo"}}
    return check_config(values, str(path) if path is not None else "serve")


class Membership(Protocol):
    """A service's part in a cluster."""

    def open(self) -> None: ...
    def routes(self, app: FastAPI) -> Any: ...
    def close(self) -> None: ...


def serve(load: Callable[[], ServeConfig], as_json: bool, quiet: bool, join: Callable[..., Membership] | None = None) -> None:
    """Serve until a signal. SIGHUP reads the configuration again with ``load``. Raises UserError before anything is served.

    join: makes a service a node of a cluster; is given it, its port, and what is told of it.
    """
    config, notify = load(), (lambda line: None) if quiet else to_stderr
    service = Service(config, notify)
    listening = bound(config.server.host, config.server.port)
    member = None if join is None else join(service, listening.getsockname()[1], notify)
    serving, done = threading.Event(), threading.Event()
    reporter = threading.Thread(target=report, args=(service, serving, done), name="edgevlm-alive", daemon=True)
    reporter.start()
    try:
        with progress("opening the cameras"):
            (service if member is None else member).open()
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        app = make_app(service, load)

        class AnnouncingServer(uvicorn.Server):
            """Says where it serves once it does, and lets streaming responses end when it is told to stop."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if as_json:
                    print(json_line("serving", {"time": wall_clock(), "url": url}), flush=True)
                else:
                    print(f"edgevlm is serving at {url}", flush=True)
                serving.set()

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await close_listeners(app.state.server)
                await super().shutdown(sockets)

        AppStatus.enable_automatic_graceful_drain = False  # close_listeners ends responses, and does not break them off
        server = AnnouncingServer(uvicorn_config(app if member is None else member.routes(app), service))
        hangups: SimpleQueue[int] = SimpleQueue()  # whose put a signal may interrupt
        threading.Thread(
            target=reload_when_told, args=(hangups, service, load, notify), name="edgevlm-reload", daemon=True
        ).start()
        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGHUP, lambda number, _: hangups.put(number))
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            pass  # uvicorn raises the signal again that it ended for
        finally:
            if before is not None:
                signal.signal(signal.SIGHUP, before)
    finally:
        done.set()
        serving.set()  # nobody waits for it any more
        reporter.join(ALIVE_S)
        Notifier().stopping()
        listening.close()
        if member is not None:
            member.close()
        service.close()


def uvicorn_config(app: Any, service: Service) -> uvicorn.Config:
    """How uvicorn serves the application, behind the guard."""
    return uvicorn.Config(
        Guard(app, service), log_config=None, log_level=logging.ERROR, access_log=False, server_header=False,
        limit_concurrency=service.config.server.max_connections, timeout_graceful_shutdown=1, proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADERS, lifespan="off", http=TimedProtocol, ws="none",
    )  # fmt: skip


class TimedProtocol(H11Protocol):
    """Closes connections that bring no request for a while, and those whose client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stuck.cancel()

    def _close_if_idle(self, before: object) -> None:
        """Close it where no request came since, and none is being answered."""
        if self.cycle is before and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)


def reload_when_told(hangups: SimpleQueue[int], service: Service, load: Callable[[], ServeConfig], notify: Notify) -> None:
    """Apply the configuration as it is, once for all signals so far; one that is wrong changes nothing and is told of."""
    while hangups.get():
        with suppress(Empty):
            while True:
                hangups.get_nowait()
        try:
            for line in service.reload(load()):
                notify(line)
        except UserError as error:
            notify(f"reload: {mask_credentials(str(error))}")


def report(service: Service, serving: threading.Event, done: threading.Event) -> None:
    """Tell of overload, reopen cameras with a torn memory; all that a service manager hears, in order.

    Before it serves, a sign of life is that this process and its helpers work: models are downloaded, exported and loaded. Then
    it is that all watched streams have got on since the last.
    """
    notifier, watched, worked = Notifier(), dict[str, tuple[int, int]](), 0.0
    while not serving.is_set() and not done.is_set():
        if (now := worked_s()) > worked:
            notifier.starting(START_S)
            worked = now + IDLE_S
        serving.wait(ALIVE_S)
    if not done.is_set():
        notifier.ready()
    while not done.is_set():
        frames = sum(stream.session.stats.frames for stream in list(service.streams.values()))
        service.report_load()
        service.reopen_torn()
        notifier.status(f"{len(service.streams)} streams, {frames:,} frames")
        signs = service.signs_of_life()
        if all(sign != watched.get(name) for name, sign in signs.items()):
            notifier.alive()
            watched = signs
        done.wait(ALIVE_S)


def worked_s() -> float:
    """Processor seconds of this process, but for the thread that asks, and of its helpers."""
    helpers = 0.0
    for helper in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            helpers += sum(helper.cpu_times()[:2])
    return time.process_time() - time.thread_time() + helpers


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)  # asyncio sends small pieces at once only on sockets that say TCP
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # so that no other server gets the port while models are loaded
    except OSError as error:
        what = error.strerror or str(error)
        raise UserError(
            f"--host {host} --port {port}: cannot be listened at ({what}); choose another, or 0 for a free one"
        ) from None
    return listening

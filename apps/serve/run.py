"""From options to a running server, and to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.run.events import to_stderr, wall_clock
from edgevlm.apps.run.watchdog import Notifier
from edgevlm.apps.schemas import json_line
from edgevlm.apps.serve.config import LOOPBACK, ServeConfig, check_config, named_cameras, read_config, secret
from edgevlm.apps.serve.guard import Guard
from edgevlm.apps.serve.http import close_listeners, make_app
from edgevlm.apps.serve.service import Service
from edgevlm.errors import UserError
from edgevlm.progress import progress

HEAD_S = 20.0  # that a request may take to come, without its body
ALIVE_S = 1.0  # from one sign of life to the next, for a service manager


def settings_of(path: Path | None, cameras: list[str], shared: dict[str, Any], server: dict[str, Any]) -> ServeConfig:
    """The file's settings, and over them those of the command line. Raises UserError."""
    values = read_config(path).model_dump(exclude_unset=True) if path is not None else {}
    values |= {name: value for name, value in shared.items() if value is not None}
    values["server"] = {**values.get("server", {}), **{name: value for name, value in server.items() if value is not None}}
    if cameras:
        values["cameras"] = {**values.get("cameras", {}), **{k: v.model_dump() for k, v in named_cameras(cameras).items()}}
    if not values.get("cameras"):
        values["cameras"] = {"demo": {"source": "demo"}}
    return check_config(values, str(path) if path is not None else "serve")


def serve(load: Callable[[], ServeConfig], as_json: bool, quiet: bool) -> None:
    """Serve until a signal. SIGHUP reads the configuration again with ``load``. Raises UserError before anything is served."""
    config, notice = load(), (lambda line: None) if quiet else to_stderr
    key = secret(config.server.key) if config.server.key is not None else None
    if key is not None and len(key) < 8:
        raise UserError("the server's key has fewer than 8 characters; use a longer one, like that of `openssl rand -hex 16`")
    if config.server.host not in LOOPBACK and key is None:
        raise UserError(f"--host {config.server.host} lets other machines in: set a key with --key-file")
    listening = bound(config.server.host, config.server.port)
    service = Service(config, notice)
    try:
        with progress("opening the cameras"):
            service.open()
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        app = make_app(service)

        class AnnouncingServer(uvicorn.Server):
            """Says where it serves once it does, and lets streaming responses end when it is told to stop."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if as_json:
                    print(json_line("serving", {"time": wall_clock(), "url": url}), flush=True)
                else:
                    print(f"edgevlm is serving at {url}", flush=True)
                Notifier().ready()

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await close_listeners(app.state.server)
                await super().shutdown(sockets)

        server = AnnouncingServer(uvicorn_config(app, config, key))
        done = threading.Event()
        threading.Thread(target=report, args=(service, done), name="edgevlm-alive", daemon=True).start()

        def reload(*_: object) -> None:
            threading.Thread(target=reload_now, args=(service, load, notice), name="edgevlm-reload", daemon=True).start()

        before = signal.signal(signal.SIGHUP, reload) if threading.current_thread() is threading.main_thread() else None
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            pass  # uvicorn raises the signal again that it ended for
        finally:
            done.set()
            if before is not None:
                signal.signal(signal.SIGHUP, before)
    finally:
        Notifier().stopping()
        listening.close()
        service.close()


def uvicorn_config(app: FastAPI, config: ServeConfig, key: str | None) -> uvicorn.Config:
    """How uvicorn serves the application, behind the guard."""
    return uvicorn.Config(
        Guard(app, config.server, key), log_config=None, log_level=logging.ERROR, access_log=False, server_header=False,
        limit_concurrency=config.server.max_connections, timeout_graceful_shutdown=1, proxy_headers=False, lifespan="off",
        http=BoundedProtocol,
    )  # fmt: skip


class BoundedProtocol(H11Protocol):
    """Connections that send no request are closed, and so are those beyond twice the limit from which on 503 is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * (self.limit_concurrency or 1 << 30):
            transport.abort()
        else:
            self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)

    def _close_if_idle(self, before: object) -> None:
        """Close it where no request came since, and none is being answered."""
        if self.transport.is_closing():
            return
        if self.cycle is before and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(HEAD_S, self._close_if_idle, self.cycle)


def reload_now(service: Service, load: Callable[[], ServeConfig], notice: Callable[[str], object]) -> None:
    """Apply the configuration as it is now; one that is wrong changes nothing and is told of."""
    try:
        for line in service.reload(load()):
            notice(line)
    except UserError as error:
        notice(f"reload: {mask_credentials(str(error))}")


def report(service: Service, done: threading.Event) -> None:
    """Tell of overload; signs of life for a service manager, each time that all watched streams have got on since the last."""
    notifier, before = Notifier(), dict[str, tuple[int, int]]()
    while not done.wait(ALIVE_S):
        frames = sum(stream.session.stats.frames for stream in list(service.streams.values()))
        service.report_load()
        notifier.status(f"{len(service.streams)} streams, {frames:,} frames")
        now = service.signs_of_life()
        if all(sign != before.get(name) for name, sign in now.items()):
            notifier.alive()
            before = now


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)  # asyncio sends small pieces at once only on sockets that say TCP
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        what = error.strerror or str(error)
        raise UserError(
            f"--host {host} --port {port}: cannot be listened at ({what}); choose another, or 0 for a free one"
        ) from None
    return listening

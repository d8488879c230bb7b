"""An HTTP proxy for FFmpeg on loopback, so that what a stream names or redirects to is dialled by :class:`AllowedHosts`."""

from __future__ import annotations

import selectors
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.errors import SourceError, SourceRefused


class HostProxy(ThreadingHTTPServer):
    """``url`` is what FFmpeg is given as its proxy; ``refused``: why the newest host was not dialled. Runs until closed."""

    daemon_threads = True

    def __init__(self, hosts: AllowedHosts, timeout_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.hosts, self.timeout_s = hosts, timeout_s
        self.refused: str | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.1,), name="edgevlm-proxy", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """FFmpeg, or the other side, went away."""


class _Tunnel(BaseHTTPRequestHandler):
    """One request of FFmpeg: CONNECT for HTTPS, else one with the whole address; then bytes both ways."""

    server: HostProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path if self.command != "CONNECT" else f"//{self.path}")
        try:
            there = self.server.hosts.connect((parts.hostname or "", parts.port or 80), self.server.timeout_s)
        except SourceRefused:
            self.server.refused = f"it names a private host, {parts.hostname}; watch that address itself"
            return self.send_error(HTTPStatus.FORBIDDEN)
        except (SourceError, OSError, ValueError):
            return self.send_error(HTTPStatus.BAD_GATEWAY)
        with there:
            if self.command == "CONNECT":
                self.send_response_only(HTTPStatus.OK)
                self.end_headers()
            else:
                path = parts._replace(scheme="", netloc="").geturl() or "/"
                del self.headers["Connection"], self.headers["Proxy-Authorization"]
                lines = [
                    f"GET {path} HTTP/1.1",
                    "Connection: close",
                    *(f"{name}: {text}" for name, text in self.headers.items()),
                ]
                there.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1"))
            self._pass_on(there)

    do_CONNECT = do_GET

    def _pass_on(self, there: socket.socket) -> None:
        """Until one side ends, or nothing has come for the time that a read may take."""
        here, self.close_connection = self.connection, True
        with selectors.DefaultSelector() as selector:
            selector.register(here, selectors.EVENT_READ, there)
            selector.register(there, selectors.EVENT_READ, here)
            while ready := selector.select(self.server.timeout_s):
                for key, _ in ready:
                    if not (data := key.fileobj.recv(1 << 16)):  # type: ignore[union-attr]
                        return
                    key.data.sendall(data)

    def log_message(self, *_: object) -> None:
        """Addresses are secrets."""

"""Keep FFmpeg on one RTSP server, because FFmpeg would follow redirects to any host."""

from __future__ import annotations

import re
import select
import socket
import ssl
import threading
from contextlib import suppress

BLOCK = 1 << 16
STATUS = re.compile(rb"RTSP/.{8}", re.DOTALL)
HARMLESS = re.compile(rb"RTSP/1\.[01](?: [1245]\d\d[ \r\n]|[\r\n].{4})", re.DOTALL)
"""Matches the start of a response that does not redirect, or the end of a request's first line."""
BEGUN = re.compile(rb"R(?:T(?:S(?:P(?:/.{0,7})?)?)?)?\Z", re.DOTALL)  # bytes that may be the beginning of a status line


class Relay:
    """Forwards one local connection to a server until either side closes it or the server redirects.

    ``problem``: what the user should do about a redirect, or None if there was no redirect.
    """

    def __init__(self, address: str, port: int, timeout_s: float, tls: bool = False) -> None:
        """Connect. Raises OSError."""
        self.problem: str | None = None
        self._server = socket.create_connection((address, port), timeout_s)
        try:
            if tls:
                context = ssl.create_default_context()  # a camera's certificate is usually self-signed
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                self._server = context.wrap_socket(self._server)
            self._listening = socket.create_server(("127.0.0.1", 0))
        except BaseException:
            self._server.close()
            raise
        self._server.settimeout(None)
        self._listening.settimeout(timeout_s)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._run, name="edgevlm-rtsp", daemon=True).start()

    def close(self) -> None:
        for each in (self._server, self._listening):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for this socket

    def _run(self) -> None:
        with self._server, suppress(OSError, ValueError):
            with self._listening:
                client, _ = self._listening.accept()
            with client:
                self._pass(client)

    def _pass(self, client: socket.socket) -> None:
        kept = b""  # bytes from the server that have not been checked yet
        while True:
            pending = isinstance(self._server, ssl.SSLSocket) and self._server.pending()
            ready = [self._server] if pending else select.select([self._server, client], (), ())[0]
            if client in ready:
                if not (block := client.recv(BLOCK)):
                    return
                self._server.sendall(block)
            if self._server in ready:
                if not (block := self._server.recv(BLOCK)):
                    client.sendall(kept)
                    return
                kept += block
                if not all(HARMLESS.fullmatch(each) for each in STATUS.findall(kept)):
                    self.problem = "the server redirects to another address; give that address"
                    return
                begun = BEGUN.search(kept, max(0, len(kept) - 12))
                end = begun.start() if begun else len(kept)
                client.sendall(kept[:end])
                kept = kept[end:]

"""Which hosts an address may reach: those that clients of a server send, and those that a stream names or redirects to."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies

from edgevlm.errors import SourceError, SourceRefused

REFUSED = [  # unless the operator lists them: this machine, link-local and multicast, what embeds IPv4, metadata of clouds
    ip_network(each)
    for each in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "100.100.100.200",
        "::/8", "fe80::/10", "ff00::/8", "2001::/32", "2002::/16", "fd00:ec2::254",
    )
]  # fmt: skip


class AllowedHosts:
    """Names, addresses and networks (``10.0.0.0/24``) that may be reached.

    None: all but this machine, link-local addresses (cloud metadata) and multicast. A listed name may resolve to any address;
    of other names every address has to be allowed.
    """

    def __init__(self, allowed: Sequence[str] | None, private: bool = True, also: str = "") -> None:
        """private: whether None allows private networks. also: a host that is always allowed. Raises ValueError."""
        self._private, self._also = private, also.lower().rstrip(".")
        self._names: set[str] | None = None
        if allowed is not None:
            self._names = {each.lower().rstrip(".") for each in allowed if not is_network(each)}
            self._networks = [ip_network(each) for each in allowed if is_network(each)]

    def resolve(self, host: str, port: int) -> str:
        """Resolve the host, once. Raises SourceRefused where an address is not allowed, SourceError where there is none."""
        try:
            found = [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise SourceError(f"its host cannot be resolved ({getattr(error, 'strerror', None) or 'no name'})") from None
        if host.lower().rstrip(".") not in (self._also, *(self._names or ())):
            for address, *_ in found:
                if not self._allows(str(address)):
                    raise SourceRefused(
                        f"clients may not name the host {host[:253]}; the operator can allow it in server.source_hosts"
                    )
        return str(found[0][0])

    def connect(self, address: tuple[str, int], *arguments: object) -> socket.socket:
        """Connect like :func:`socket.create_connection`, to an allowed host."""
        host, port = address
        return socket.create_connection((self.resolve(host, port), port), *arguments)  # type: ignore[arg-type]

    def _allows(self, text: str) -> bool:
        address: IPv4Address | IPv6Address = ip_address(text)
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if self._names is None:
            return (self._private or address.is_global) and not any(address in network for network in REFUSED)
        return any(address in network for network in self._networks)


def is_network(text: str) -> bool:
    """Return whether it is an address or a network rather than a name. Raises ValueError for an invalid network."""
    try:
        ip_network(text)
    except ValueError:
        if "/" in text or ":" in text or not text:
            raise
        return False
    return True


class HostProxy(ThreadingHTTPServer):
    """An HTTP proxy for FFmpeg on loopback, so that :class:`AllowedHosts` dials what a stream names or redirects to.

    ``url``: FFmpeg's ``http_proxy``; ``refused``: why the newest host was not dialled. Runs until closed.
    """

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
                headers = [f"{name}: {text}" for name, text in self.headers.items()]
                lines = [f"GET {path} HTTP/1.1", "Connection: close", *headers, ""]
                there.sendall("".join(f"{line}\r\n" for line in lines).encode("latin-1"))
            self._pass_on(there)

    do_CONNECT = do_GET

    def _pass_on(self, there: socket.socket) -> None:
        """Until one side ends, or is silent for as long as a read may take."""
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


def proxy_for(url: str, timeout_s: float) -> HostProxy | None:
    """Start a proxy that dials the address's own host and public ones.

    None for other schemes than HTTP, or where the user has a proxy.
    """
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https") or "http" in getproxies():
        return None
    return HostProxy(AllowedHosts(None, private=False, also=parts.hostname or ""), timeout_s)

"""Limit which hosts a client can make this machine contact through an address, a redirect or a link in a stream."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

from edgevlm.errors import SourceError, SourceRefused

HERE = [  # addresses of this machine, its link and its cloud's services, multicast, and IPv6 addresses that embed IPv4
    ip_network(each)
    for each in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "224.0.0.0/3", "100.100.100.200", "168.63.129.16",
        "::/8", "fe80::/10", "ff00::/8", "2001::/32", "2002::/16", "fd00:ec2::254", "fd20:ce::254",
    )
]  # fmt: skip
NAT64 = ip_network("64:ff9b::/96")


class AllowedHosts:
    """The names, addresses and networks (``10.0.0.0/24``) that may be reached.

    If ``allowed`` is None, all hosts are allowed except this machine, link-local addresses (such as cloud metadata) and
    multicast. A listed name may resolve to any address; a name that is not listed must resolve only to allowed addresses.
    """

    def __init__(self, allowed: Sequence[str] | None, private: bool = True, also: str = "") -> None:
        """Parse the list of allowed hosts. Raises ValueError.

        ``private``: whether private networks are allowed if ``allowed`` is None.
        ``also``: a host that is always allowed.
        """
        self._private, self._also = private, also.lower().rstrip(".")
        self._names: set[str] | None = None
        if allowed is not None:
            self._names = {each.lower().rstrip(".") for each in allowed if not is_network(each)}
            self._networks = [ip_network(each) for each in allowed if is_network(each)]

    def resolve(self, host: str, port: int) -> str:
        """Return a host's IP address. Raises SourceRefused if the host is not allowed, SourceError if the name is unknown."""
        found = addresses(host, port)
        if host.lower().rstrip(".") not in (self._also, *(self._names or ())):
            for address in found:
                if not self._allows(address):
                    raise SourceRefused(
                        f"the host {host[:253]} is not allowed; the operator can list it in server.source_hosts"
                    )
        return found[0]

    def connect(self, address: tuple[str, int], *arguments: object) -> socket.socket:
        """Connect to an allowed host, like :func:`socket.create_connection`."""
        host, port = address
        return socket.create_connection((self.resolve(host, port), port), *arguments)  # type: ignore[arg-type]

    def _allows(self, text: str) -> bool:
        if self._names is None:
            return reach(text) in (("public", "private") if self._private else ("public",))
        return any(plain(text) in network for network in self._networks)


def plain(text: str) -> IPv4Address | IPv6Address:
    """Parse an IP address. An IPv6 address that contains an IPv4 address (mapped or NAT64) becomes the IPv4 address."""
    address = ip_address(text)
    if isinstance(address, IPv6Address) and (address.ipv4_mapped is not None or address in NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def reach(text: str) -> Literal["here", "private", "public"]:
    """Classify an address as ``here`` (this machine, link-local or cloud metadata), ``private`` or ``public``."""
    address = plain(text)
    if any(address in network for network in HERE) or _is_own(address):
        return "here"
    return "public" if address.is_global and not getattr(address, "is_site_local", False) else "private"


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))  # connecting a UDP socket sends no packet
        return ip_address(probe.getsockname()[0]) == address
    return False


def addresses(host: str, port: int) -> list[str]:
    """Resolve a host's name to IP addresses. Raises SourceError."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise SourceError(unresolved(host, error)) from None


def unresolved(host: str, error: Exception) -> str:
    if getattr(error, "errno", None) == socket.EAI_AGAIN:
        return f"no name server answers for {host[:253]}; check this machine's network, or give an IP address"
    return f"host {host[:253]} not found; check the address or give an IP address"


def is_network(text: str) -> bool:
    """Return whether ``text`` is an address or a network rather than a name. Raises ValueError for an invalid network."""
    try:
        ip_network(text)
    except ValueError:
        if "/" in text or ":" in text or not text:
            raise
        return False
    return True

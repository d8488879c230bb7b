"""Read and check the environment variables that set proxies and certificates for HTTP clients."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from urllib.request import getproxies, proxy_bypass

from edgevlm.apps.hosts import reach

LOCAL = (".local", ".lan", ".internal", ".home.arpa")


def is_private(host: str) -> bool:
    """Return whether a host is this machine or on a private network, and therefore needs no proxy."""
    if host.lower().endswith(LOCAL):
        return True
    with suppress(OSError, UnicodeError):
        return any(reach(str(entry[4][0])) != "public" for entry in socket.getaddrinfo(host, None))
    return False


def proxies_for(host: str) -> dict[str, str]:
    """Return the environment's proxies by scheme, or none if the host is private."""
    found = getproxies()
    return {} if not found or proxy_bypass(host) or is_private(host) else found


def proxy_variables(*schemes: str) -> str:
    """Return the names of the environment variables that set a proxy for these schemes."""
    wanted = (*(f"{scheme}_proxy" for scheme in schemes), "all_proxy")
    return ", ".join(name for name, value in os.environ.items() if value and name.lower() in wanted)


def environment_problem(error: Exception) -> str:
    """Return the cause and the fix if an environment variable caused an HTTP client's error, or "" otherwise."""
    why, proxies = " ".join(str(error).split())[:200], proxy_variables("http", "https")
    files = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)]
    if isinstance(error, ssl.SSLError | FileNotFoundError | PermissionError) and error.filename is None and files:
        return f"the certificates in {' and '.join(files)} cannot be read ({why}); unset it or set it to a readable file"
    if proxies and ("proxy" in why.lower() or type(error).__name__ == "InvalidURL"):
        return f"the proxy in {proxies} cannot be used ({why}); set it to http://HOST:PORT or unset it"
    return ""

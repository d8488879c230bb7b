"""What every request passes before a route sees it: host, origin, key, size."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from edgevlm.apps.serve.config import LOOPBACK
from edgevlm.apps.serve.service import Service

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BURST_S = 10.0  # of requests at the highest rate that an address may send at once
MANY = 1024  # addresses that are remembered, but for those that ask now
BODY_S = 30.0  # that a request's body may take to come
MAX_HEADERS = 64 << 10  # bytes
SMALL = 64 << 10  # bytes of a body that is read however many others are
OPEN_PATHS = ("/", "/static/", "/health/")  # need no key: they tell nothing of what is watched
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Guard:
    """An ASGI application in front of another. Settings and key are those that its service has at the time."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service
        self._rate = RequestRate()
        self._held = 0  # bytes of bodies of requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if sum(map(len, itertools.chain(*scope["headers"]))) > MAX_HEADERS:
            await refuse(send, 431, f"the headers have more than {MAX_HEADERS} bytes", "too_large")
            return
        early = self._rate.early(scope["client"][0] if scope.get("client") else "", self._service.config.server.max_rate)
        if early > 0:
            await refuse(send, 429, "too many requests a second; ask again later", "rate_limit_exceeded", early)
            return
        if problem := self._problem(scope["path"], headers):
            await refuse(send, *problem)
            return
        limit, taken = self._service.config.server.max_body, 0
        too_large = f"the request has more than {limit} bytes"
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > limit:
            await refuse(send, 413, too_large, "too_large")
            return

        deadline: float | None = asyncio.get_running_loop().time() + BODY_S  # None once the body is there

        async def bounded() -> Message:
            nonlocal taken, deadline
            try:
                wait = None if deadline is None else deadline - asyncio.get_running_loop().time()
                message = await asyncio.wait_for(receive(), wait)
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not come within {BODY_S:g} s", {"connection": "close"}) from None
            if not message.get("more_body"):
                deadline = None
            taken += len(message.get("body", b""))
            self._held += len(message.get("body", b""))
            if taken > limit:
                raise HTTPException(413, too_large)
            if taken > SMALL and self._held > 4 * limit:
                raise HTTPException(429, "too many large requests at once; try again in a moment", {"retry-after": "1"})
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                docs = scope["path"] == "/docs"  # FastAPI's own page, whose script comes from elsewhere
                message = {**message, "headers": [*message["headers"], *(own[1:] if docs else own)]}
            await send(message)

        try:
            await self._app(scope, bounded, with_headers)
        finally:
            self._held -= taken

    def _problem(self, path: str, headers: Mapping[bytes, str]) -> tuple[int, str, str] | None:
        """Status, message and code of a refusal; None for a request that may pass."""
        host = host_of(headers.get(b"host", ""))
        if host not in self._hosts() and not is_address(host):
            return 421, f"the host {host[:100]!r} is not this server's; add it to server.hosts", "wrong_host"
        origin = headers.get(b"origin")
        if origin is not None and origin.lower().partition("://")[2] != headers.get(b"host", "").lower():
            return 403, "requests from pages of other sites are refused", "wrong_origin"
        key = self._service.key
        if key is None or path == "/" or path.startswith(OPEN_PATHS[1:]):
            return None
        given = headers.get(b"authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            return 401, "give the server's key: Authorization: Bearer KEY", "invalid_api_key"
        return None

    def _hosts(self) -> tuple[str, ...]:
        server = self._service.config.server
        return (*LOOPBACK, server.host, *server.hosts)


def host_of(header: str) -> str:
    """The name of a ``Host`` header, without the port; empty where it is none."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return ""
    return parts.hostname or "" if parts.netloc == header and "@" not in header else ""


def is_address(host: str) -> bool:
    """Whether it is an address: no name that another site's page could have pointed here."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def error_body(message: str, code: str | None, param: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class RequestRate:
    """Requests of each address, counted: BURST_S seconds' worth may come at once."""

    def __init__(self) -> None:
        self._rested: dict[str, float] = {}  # when an address may send as many at once again

    def early(self, address: str, rate: float) -> float:
        """Seconds until the address may send a request again; 0 where it may now, and that one is counted."""
        now = time.monotonic()
        rested = max(self._rested.get(address, now), now) + 1 / rate
        if rested > now + BURST_S:
            return rested - now - BURST_S
        self._rested[address] = rested
        if len(self._rested) > MANY:
            self._rested = {each: at for each, at in self._rested.items() if at > now}
        return 0.0


async def refuse(send: Send, status: int, message: str, code: str, soon: float = 1.0) -> None:
    body = json.dumps(error_body(message, code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if status in (429, 503):
        headers.append((b"retry-after", str(math.ceil(soon)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

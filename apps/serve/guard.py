"""What every request passes before a route sees it: rate, host, origin, key, size."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import time
from ipaddress import ip_address

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgevlm.apps.serve.config import LOOPBACK, ServerSettings
from edgevlm.apps.serve.errors import ApiError, respond
from edgevlm.apps.serve.service import Service

BURST_S = 10.0  # of requests at the highest rate that an address may send at once
MANY = 1024  # addresses that are remembered, but for those that ask now
BODY_S = 30.0  # that a request's body may take to come
SMALL = 64 << 10  # bytes of a body that is read however many others are
OPEN_PATHS = ("/static/", "/health/")  # need no key: they show nothing of what is watched
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.IGNORECASE)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"cross-origin-resource-policy": "same-origin", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Guard:
    """An ASGI application in front of another. It reads the service's settings and key at each request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._rested: dict[str, float] = {}  # when an address may send as many requests at once again
        self._held = 0  # bytes of bodies of requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Request(scope))
        except ApiError as error:
            response = respond(error)
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        limit, taken = self._service.config.server.max_body, 0
        deadline: float | None = time.monotonic() + BODY_S  # None once the body is there

        async def bounded() -> Message:
            nonlocal taken, deadline
            try:
                message = await asyncio.wait_for(receive(), None if deadline is None else deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not come within {BODY_S:g} s", {"connection": "close"}) from None
            if not message.get("more_body"):
                deadline = None
            size = len(message.get("body", b""))
            taken, self._held = taken + size, self._held + size
            if taken > limit:
                raise too_large(limit)
            if taken > SMALL and self._held > 4 * limit:
                raise ApiError(429, "too many large requests at once; try again in a moment", "rate_limit_exceeded")
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if scope["path"] != "/docs":  # FastAPI's own page, whose script comes from elsewhere
                    headers["content-security-policy"] = POLICY
            await send(message)

        try:
            await self._app(scope, bounded, with_headers)
        finally:
            self._held -= taken

    def _check(self, request: Request) -> None:
        headers, path, server = request.headers, request.url.path, self._service.config.server
        now, address = time.monotonic(), request.client.host if request.client else ""
        rested = max(self._rested.get(address, now), now) + 1 / server.max_rate
        if (early := rested - now - BURST_S) > 0:
            why = "too many requests a second; ask again later"
            raise ApiError(429, why, "rate_limit_exceeded", soon=math.ceil(early))
        self._rested[address] = rested
        if len(self._rested) > MANY:
            self._rested = {each: at for each, at in self._rested.items() if at > now}
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_ours(host, server):
            raise ApiError(421, f"the host {host[:100]!r} is not this server's; add it to server.hosts", "wrong_host")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            raise ApiError(403, "requests from pages of other sites are refused", "wrong_origin")
        key, given = self._service.key, headers.get("authorization", "").removeprefix("Bearer ")
        is_open = key is None or path == "/" or path.startswith(OPEN_PATHS)
        if not is_open and not hmac.compare_digest(given.encode(), str(key).encode()):
            raise ApiError(401, "give the server's key: Authorization: Bearer KEY", "invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > server.max_body:
            raise too_large(server.max_body)


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request has more than {limit} bytes", "too_large")


def is_ours(header: str, server: ServerSettings) -> bool:
    """Return whether a ``Host`` header has a name of this server, or an address, to which no site's name can be pointed."""
    found = HOST.fullmatch(header)
    name = (found[1] or found[2]).lower() if found else ""
    try:
        return name in (*LOOPBACK, server.host, *server.hosts) or bool(name and ip_address(name))
    except ValueError:
        return False

"""Check each request's rate, host, origin, key and size before routing, and remove a proxy's prefix from the request's path."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import time
from base64 import b64decode
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgevlm.apps.serve.config import LOOPBACK, ServerSettings
from edgevlm.apps.serve.errors import ApiError, respond
from edgevlm.apps.serve.service import Service
from edgevlm.engines.weights_memory import trim

BURST_S = 10.0  # a client address may send this many seconds' worth of requests at once
MANY = 1024
BODY_S = 30.0
LINGER_S = 2.0
MAX_VALUES = 10_000  # maximum number of values in a JSON body, counted by its commas
GAP_S = 0.05
TRIM_S = 5.0
SMALL = 64 << 10  # a body of at most this many bytes is read even while many large bodies are being read
OPEN_PATHS = ("/static/", "/health")
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.IGNORECASE)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = {
    "content-security-policy": POLICY, "cross-origin-resource-policy": "same-origin", "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}  # fmt: skip
ASKING = re.compile(
    "^(?:/v1)*(?=/(?:chat/completions|completions|responses|models)(?:/|$))"
)  # OpenAI's paths after any number of /v1
CHALLENGE = {"WWW-Authenticate": 'Basic realm="edgevlm", Bearer'}


class Guard:
    """ASGI middleware that checks each request against the service's current settings and key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._rested: dict[str, float] = {}  # time from which each client address may send a full burst again
        self._held = 0
        self._trimming = False
        self._parsing = asyncio.Lock()  # held for GAP_S longer than a large body's parsing, so that small requests can pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            prefix = self._prefix(Headers(scope=scope), scope["path"])
            if prefix and scope["path"] == prefix:  # the page's links are relative to a path that ends in /
                place = quote(prefix.rpartition("/")[2])
                await Response(status_code=308, headers={"location": f"./{place}/"})(scope, receive, send)
                return
            scope = {**scope, "root_path": "", "path": plain_path(scope["path"].removeprefix(prefix))}
            self._check(Request(scope))
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        limit, taken, values = self._service.config.server.max_body, 0, 0
        deadline: float | None = time.monotonic() + BODY_S  # the body's deadline; None once the body has arrived

        async def bounded() -> Message:
            nonlocal taken, values, deadline
            try:
                message = await asyncio.wait_for(receive(), None if deadline is None else deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_S:g} s", {"connection": "close"}) from None
            if not message.get("more_body"):
                deadline = None
            size = len(body := message.get("body", b""))
            taken, self._held, values = taken + size, self._held + size, values + body.count(b",")
            if taken > limit:
                raise too_large(limit)
            if values > MAX_VALUES:
                raise ApiError(413, f"the request contains more than {MAX_VALUES:,} values (counted by commas)", "too_large")
            if taken > SMALL and self._held > 4 * limit:
                raise ApiError(429, "too many large requests at once; try again in a moment", "rate_limit_exceeded")
            if deadline is None and taken > SMALL:
                await self._parsing.acquire()
                loop = asyncio.get_running_loop()
                loop.call_soon(
                    loop.call_later, GAP_S, self._parsing.release
                )  # release the lock GAP_S seconds after the body was parsed
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
            await send(message)

        try:
            await self._app(scope, bounded, with_headers)
        finally:
            self._held -= taken
            if taken > SMALL and not self._trimming:
                self._trimming = True
                asyncio.get_running_loop().call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        self._trimming = False
        with suppress(RuntimeError):  # no thread can be started
            asyncio.get_running_loop().run_in_executor(None, trim)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error, then discard the request's body for up to LINGER_S seconds, because proxies report 502 otherwise."""
        response, headers = respond(error), Headers(scope=scope)
        response.headers["connection"] = "close"
        if "expect" in headers or not ("content-length" in headers or "transfer-encoding" in headers):
            await response(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})

        async def discard() -> None:
            left = self._service.config.server.max_body
            while (message := await receive()).get("more_body") and left > 0:
                left -= len(message["body"])

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(discard(), LINGER_S)
        await send({"type": "http.response.body"})

    def _prefix(self, headers: Headers, path: str) -> str:
        """Return the proxy's prefix if ``path`` starts with it, otherwise ``""``."""
        prefixes = [named_prefix(headers), self._service.config.server.root_path.rstrip("/")]
        return next((each for each in filter(None, prefixes) if path == each or path.startswith(f"{each}/")), "")

    def _check(self, request: Request) -> None:
        headers, path, server = request.headers, request.url.path, self._service.config.server
        now, address = time.monotonic(), request.client.host if request.client else ""
        rested = max(self._rested.get(address, now), now) + 1 / server.max_rate
        if (early := rested - now - BURST_S) > 0:
            why = "too many requests per second; try again later"
            raise ApiError(429, why, "rate_limit_exceeded", soon=math.ceil(early))
        self._rested[address] = rested
        if len(self._rested) > MANY:
            self._rested = {each: at for each, at in self._rested.items() if at > now}
        host = headers.get("host")  # load balancers' health checks omit the Host header; browsers always send it
        if host is not None and not is_ours(host, server):
            raise ApiError(421, f"host {host[:100]!r} does not match this server; add it to server.hosts", "wrong_host")
        if not is_own_page(headers, server):
            why = "requests from other sites' pages are refused; if a proxy serves this page, add its host to server.hosts"
            raise ApiError(403, why, "wrong_origin")
        key = self._service.key
        is_open = key is None or path == "/" or path.startswith(OPEN_PATHS)
        if not is_open and not any(hmac.compare_digest(given.encode(), str(key).encode()) for given in given_keys(headers)):
            why = "missing or wrong key; send the header Authorization: Bearer KEY"
            # our page asks for the key itself and sends x-api-key; a challenge would make the browser ask for a password
            raise ApiError(401, why, "invalid_api_key", headers=None if "x-api-key" in headers else CHALLENGE)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > server.max_body:
            raise too_large(server.max_body)


def named_prefix(headers: Headers) -> str:
    """Return the path prefix that a proxy names in a request header, or ``""``."""
    return (headers.get("x-ingress-path") or headers.get("x-forwarded-prefix") or "").rstrip("/")


def plain_path(path: str) -> str:
    """Remove repeated and trailing slashes. Give OpenAI's paths exactly one ``/v1``, which some clients omit or repeat."""
    return ASKING.sub("/v1", re.sub("/+", "/", path).rstrip("/") or "/")


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit} bytes", "too_large")


def is_ours(header: str, server: ServerSettings) -> bool:
    """Return whether a ``Host`` header is this server's name or an IP address. Other names may come from DNS rebinding."""
    name = host_name(header)
    try:
        return name in (*LOOPBACK, server.host, *server.hosts) or bool(name and ip_address(name))
    except ValueError:
        return False


def is_own_page(headers: Headers, server: ServerSettings) -> bool:
    """Return False if the request comes from another site's page, otherwise True.

    Browsers send ``Sec-Fetch-Site`` only for secure pages; for other pages, the host in the ``Origin`` header decides.
    """
    origin = headers.get("origin")
    if origin is None or headers.get("sec-fetch-site") in ("same-origin", "none"):
        return True
    place = origin.lower().partition("://")[2]
    return place == headers.get("host", "").lower() or host_name(place) in server.hosts


def host_name(place: str) -> str:
    found = HOST.fullmatch(place)
    return (found[1] or found[2]).lower() if found else ""


def given_keys(headers: Headers) -> list[str]:
    """Return the keys that a request contains: the Basic password or the Bearer token, and the ``X-Api-Key`` header."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):
            given = b64decode(given).decode().partition(":")[2]
    return [given, headers.get("x-api-key", "")]

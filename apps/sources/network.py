"""Read network cameras over HTTP and RTSP."""

from __future__ import annotations

import errno
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib import request as http
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit

from edgevlm.apps.hosts import AllowedHosts, addresses, unresolved
from edgevlm.apps.proxies import proxies_for, proxy_variables
from edgevlm.apps.sources.base import Connection, Grabbed, Image, SourceOptions
from edgevlm.apps.sources.live import KEYFRAME_WAIT_S
from edgevlm.apps.sources.picture import JPEG, PNG, split_pictures, try_decoding
from edgevlm.apps.sources.rtsp_relay import Relay
from edgevlm.apps.sources.video import CONTAINERS, Feed, RecordedClock, Video, load_av
from edgevlm.errors import SourceError, SourceRefused, UserError

PORTS = {"rtsp": 554, "rtsps": 322, "rtmp": 1935, "http": 80, "https": 443}
REASONS = {  # error messages by errno
    errno.ECONNREFUSED: "{} refused the connection; check the port, and that the camera is on",
    errno.EHOSTUNREACH: "{} cannot be reached from this machine; check the address, and that the camera is on",
    errno.ENETUNREACH: "{} cannot be reached from this machine; check its network",
    errno.ETIMEDOUT: "{} does not answer; check the address, and that the camera is on",
    errno.ECONNRESET: "{} closed the connection",
    errno.EPIPE: "{} closed the connection",
    errno.EIO: "the connection to {} closed before any video arrived; check its port and path",
}
RAW = "invalid address; percent-encode / # ? in the password, or give username and password separately"
UNMENDABLE = {
    401: "wrong or missing user name and password (401); give username and password, or put USER:PASSWORD@ before the host",
    403: "access denied (403); check the address's user name, password and path",
    404: "stream not found (404); check the address's path",
}
SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "rtmpt", "rtmpts", "rtmpe", "rtmpte", "udp", "tcp", "tls", "rtp", "srt")
PROTOCOLS = f"{','.join(SCHEMES)},srtp,http,https,ffrtmphttp,ffrtmpcrypt"
BOUND = "rtsp,rtmp,rtmps,tcp,tls"  # protocols allowed with checked hosts: none leads FFmpeg to another host
LOW_LATENCY = {
    "rtsp_transport": "tcp",
    "fflags": "nobuffer",
    "flags": "low_delay",
    "analyzeduration": "0",
    "probesize": "32",
}
LARGEST, MORE = 16 << 20, 1 << 20
"""Largest size of a picture in bytes; a picture may also be at most four times as large as the previous one, plus MORE."""


def connect(url: str, options: SourceOptions) -> Connection:
    """Open a connection to a network camera.

    Raises SourceError, or SourceRefused if a retry would fail. If ``options.hosts`` is set, redirects and playlists reach only
    allowed hosts. FFmpeg then gets IP addresses instead of host names, and RTSP redirects are refused.
    """
    parts, hosts = split_address(url), options.hosts
    if parts.scheme.lower() in ("http", "https"):
        response = _request(url, parts, hosts, options)
        try:
            return _connected(url, parts, options, response)
        except BaseException:
            response.close()
            raise
    if hosts is not None:
        login, at, _ = parts.netloc.rpartition("@")
        address = hosts.resolve(parts.hostname or "", parts.port or 0)
        host = f"[{address}]" if ":" in address else address
        url = parts._replace(netloc=f"{login}{at}{host}" + f":{parts.port}" * (parts.port is not None)).geturl()
        if parts.scheme.lower() in ("rtsp", "rtsps"):
            return _relayed(url, address, options)
    elif parts.hostname:
        try:
            addresses(parts.hostname, parts.port or 0)  # FFmpeg would report an unknown host name as an input/output error
        except SourceError as error:
            raise SourceError(RAW if is_raw(parts) else str(error)) from None
    return FfmpegConnection(url, options)


def _relayed(url: str, address: str, options: SourceOptions) -> Connection:
    camera = split_address(url)
    scheme = camera.scheme.lower()
    try:
        relay = Relay(address, camera.port or PORTS[scheme], options.open_timeout_s, tls=scheme == "rtsps")
    except OSError as error:
        raise SourceError(explain(error, camera)) from None
    try:
        return FfmpegConnection(url, options, relay=relay)
    except BaseException as error:
        relay.close()
        if isinstance(error, SourceError) and relay.problem:
            raise SourceRefused(relay.problem) from None
        raise


def _connected(url: str, parts: SplitResult, options: SourceOptions, response: HTTPResponse) -> Connection:
    kind = response.headers.get_content_type()
    begins = b"" if kind.startswith("multipart/") else response.peek(len(PNG)).lstrip()
    if kind.startswith(("multipart/", "image/")) or begins.startswith((JPEG, PNG)):
        return PictureConnection(response, lambda headers: _request(url, parts, options.hosts, options, headers), options)
    if kind == "text/html" or begins[:5].lower() in (b"<html", b"<!doc"):
        raise SourceRefused("the address returned a web page, not video (perhaps a login form); check its path and password")
    return FfmpegConnection(url, options, response)


def split_address(url: str) -> SplitResult:
    """Split a network camera's address into its parts. Raises SourceRefused if the address is invalid."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SourceRefused(RAW if "@" in url else "invalid address; give SCHEME://HOST:PORT/PATH") from None
    return parts


def is_raw(parts: SplitResult) -> bool:
    """Return whether an address seems to be cut short by a special character in a password: ``rtsp://user:12/34@host``."""
    return "@" not in parts.netloc and "@" in parts._replace(scheme="", netloc="").geturl()


def _request(
    url: str, camera: SplitResult, hosts: AllowedHosts | None, options: SourceOptions, headers: dict[str, str] | None = None
) -> HTTPResponse:
    parts, known = urlsplit(url), http.HTTPPasswordMgrWithDefaultRealm()
    if camera.username is not None:
        own = camera._replace(netloc=camera.netloc.rpartition("@")[2], path="/", query="", fragment="").geturl()
        known.add_password(None, own, unquote(camera.username), unquote(camera.password or ""))
    opener, proxies = http.OpenerDirector(), proxies_for(camera.hostname or "")
    dialled = (http.ProxyHandler(proxies), http.HTTPHandler(), http.HTTPSHandler()) if hosts is None else (BoundHandler(hosts),)
    others = http.HTTPRedirectHandler(), http.HTTPErrorProcessor(), http.HTTPDefaultErrorHandler(), http.UnknownHandler()
    for handler in (*dialled, *others, http.HTTPBasicAuthHandler(known), http.HTTPDigestAuthHandler(known)):
        opener.add_handler(handler)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    timeout_s = max(options.open_timeout_s, options.read_timeout_s)  # LiveSource applies each of these timeouts itself
    try:
        asked = http.Request(address, headers={"User-Agent": "edgevlm", **(headers or {})})
        response: HTTPResponse = opener.open(asked, timeout=timeout_s)
        return response
    except HTTPError as error:
        error.close()
        if error.code == 304:
            raise Unchanged("its picture has not changed") from None
        words = UNMENDABLE.get(error.code)
        raise SourceRefused(words) if words else SourceError(f"the camera returned HTTP status {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted ({reason.verify_message}); check this machine's clock, or set SSL_CERT_FILE"
            raise SourceError(why) from None
        if isinstance(reason, TimeoutError):
            raise SourceError("timed out (--open-timeout)") from None
        text = explain(reason, parts) if isinstance(reason, OSError) else None
        by = f", through the proxy in {proxy_variables(parts.scheme)}" if hosts is None and parts.scheme in proxies else ""
        raise SourceError((text or f"invalid response ({type(reason).__name__})") + by) from None


class Unchanged(SourceError):
    """Raised when a single picture has not changed since the last request (status 304)."""


class BoundHandler(http.AbstractHTTPHandler):
    """Opens HTTP addresses and follows redirects, but only on allowed hosts."""

    http_request = https_request = http.AbstractHTTPHandler.do_request_

    def __init__(self, hosts: AllowedHosts) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, request: http.Request) -> HTTPResponse:
        def dialled(*arguments: Any, **options: Any) -> HTTPConnection:
            made = (HTTPSConnection if request.type == "https" else HTTPConnection)(*arguments, **options)
            vars(made)["_create_connection"] = self._hosts.connect  # http.client's way to open sockets, including TLS
            return made

        return self.do_open(dialled, request)

    https_open = http_open


Ask = Callable[[dict[str, str]], HTTPResponse]


class PictureConnection(Connection):
    """Reads pictures over HTTP, from a Motion JPEG stream or by requesting ``fps`` pictures a second.

    Pictures are decoded one by one, so their size and format may change. Pictures have no timestamps. ``ask``: repeats the
    request with extra headers, such as If-None-Match to skip an unchanged picture.
    """

    def __init__(self, response: HTTPResponse, ask: Ask, options: SourceOptions) -> None:
        self._ask, self._options, self._data, self._seen = ask, options, b"", False
        self._read(response)

    def _read(self, response: HTTPResponse) -> None:
        self._response, self._kind, self._began = response, response.headers.get_content_type(), time.monotonic()
        self._feed = Feed(self._take, LARGEST, self._options.read_timeout_s)
        self._pictures = split_pictures(self._feed.read)

    def _take(self, count: int) -> bytes:
        block = self._response.read1(count)
        if not self._seen and (found := re.search(rb"(?i)content-type:\s*([\w./+-]{1,99})", block)):
            self._kind = found[1].decode()  # the type of one part of a multipart response
        return block

    def grab(self) -> Grabbed | None:
        self._feed.renew()
        data = next(self._pictures, None)
        if self._feed.problem:
            self.problem = f"{self._feed.problem}; the camera sends {self._kind}"
            return None
        if data is None:
            return self._again()
        changed, self._data = data != self._data, data
        self._seen, self._feed.largest = True, min(LARGEST, MORE + 4 * len(data))
        still = self._response.length is not None
        return Grabbed(corrupt=not data, decoded=changed or not still)

    def _again(self) -> Grabbed | None:
        headers = self._response.headers
        if not self._seen or headers.get_content_maintype() == "multipart":
            self.problem = None if self._seen else f"no JPEG or PNG picture in the response; the camera sends {self._kind}"
            return None
        if (early := self._began + 1 / self._options.fps - time.monotonic()) > 0:
            time.sleep(min(early, 1.0))
            return Grabbed(decoded=False)
        tags = {"If-None-Match": headers["ETag"], "If-Modified-Since": headers["Last-Modified"]}
        self._response.close()
        try:
            self._read(self._ask({name: value for name, value in tags.items() if value}))
        except Unchanged:
            self._began = time.monotonic()
        return Grabbed(decoded=False)

    def retrieve(self) -> Image | None:
        return try_decoding(self._data)

    def close(self) -> None:
        self._response.close()


class FfmpegConnection(Connection):
    """Decodes one video stream with FFmpeg. Raises SourceError with a message that does not contain the address.

    A video file at a URL plays at its recorded speed, and then ends. ``response``: an HTTP response that FFmpeg reads instead
    of opening an address. Addresses in an HTTP playlist are requested only on the camera's own host and on public hosts. If
    ``options.hosts`` is set, only allowed hosts are requested.
    """

    def __init__(
        self, url: str, options: SourceOptions, response: HTTPResponse | None = None, relay: Relay | None = None
    ) -> None:
        self._options, self._camera, self._response, self._relay = options, split_address(url), response, relay
        self._feeds: list[Feed] = []
        self._video: Video | None = None
        scheme = self._camera.scheme.lower()
        if response is None and scheme not in SCHEMES:
            raise SourceRefused(f"{scheme}:// is not supported; give http, {', '.join(SCHEMES)}, or a file")
        try:
            self._video = self._open(url, scheme)
        except BaseException:
            self._release()
            raise
        context = self._video.stream.codec_context
        context.flags |= load_av().codec.context.Flags.low_delay
        self._recorded = not scheme.startswith("rtsp") and self._video.container.duration is not None
        self._clock, self._origin = RecordedClock(self._video.period_s), 0.0
        self._frame: Any = None
        self._pictures = self._decode(self._video)

    def grab(self) -> Grabbed | None:
        for feed in self._feeds:
            feed.renew()
        try:
            grabbed = next(self._pictures)
        except (StopIteration, load_av().error.FFmpegError, UserError) as error:
            failed = None if isinstance(error, StopIteration) else explain(error, self._camera)
            self.problem = next((feed.problem for feed in self._feeds if feed.problem), failed)
            self.finished = self._recorded and self.problem is None
            return None
        if self._recorded and grabbed.decoded and not grabbed.corrupt:  # play a recording at its own speed
            first, time_s, now = self._clock.time_s is None, self._clock(grabbed.stamp_s), time.monotonic()
            self._origin = now if first else self._origin
            time.sleep(min(max(0.0, self._origin + time_s - now), 1.0))
        return grabbed

    def retrieve(self) -> Image | None:
        assert self._video is not None
        return self._video.rgb(self._frame)

    def close(self) -> None:
        self._pictures.close()  # type: ignore[attr-defined]
        self._release()

    def _release(self) -> None:
        for each in (self._video, self._relay, self._response, *self._feeds):
            if each is not None:
                each.close()

    def _open(self, url: str, scheme: str) -> Video:
        options, began = self._options, time.monotonic()
        if self._relay is not None:
            login, at, _ = self._camera.netloc.rpartition("@")
            url = self._camera._replace(scheme="rtsp", netloc=f"{login}{at}127.0.0.1:{self._relay.port}").geturl()
        if self._response is None:
            protocols = PROTOCOLS if options.hosts is None else BOUND
            allowed = {"protocol_whitelist": protocols, "format_whitelist": f"{CONTAINERS},rtsp,rtp"}
            more: dict[str, Any] = {"options": allowed | (LOW_LATENCY if scheme.startswith("rtsp") else {})}
        else:
            url = self._response.geturl()
            listed = {"http_persistent": "0", "http_multiple": "0"}
            allowed = {"protocol_whitelist": "http,https,tls,tcp", "format_whitelist": f"{CONTAINERS},hls"}
            more = {"options": allowed | listed, "io_open": self._feed}
        try:
            return Video(url, threads="SLICE", timeout=(options.open_timeout_s, options.read_timeout_s), **more)
        except load_av().error.FFmpegError as failed:
            error = load_av().error
            codes = {error.HTTPUnauthorizedError: 401, error.HTTPForbiddenError: 403, error.HTTPNotFoundError: 404}
            if (code := codes.get(type(failed))) is not None:
                raise SourceRefused(UNMENDABLE[code]) from None
            if time.monotonic() - began >= options.open_timeout_s:
                raise SourceError(f"no answer within {options.open_timeout_s:g} s (--open-timeout)") from None
            raise SourceError(explain(failed, self._camera)) from None

    def _feed(self, url: str, *_: object) -> Feed:
        options, response, camera = self._options, self._response, self._camera
        if self._feeds or response is None:
            hosts = options.hosts
            if hosts is None and "http" not in proxies_for(camera.hostname or ""):
                hosts = AllowedHosts(None, private=False, also=camera.hostname or "")
            try:
                response = _request(url, camera, hosts, options)
            except SourceRefused as refused:
                raise SourceRefused(f"its playlist lists an address that is refused: {refused}") from None
        self._feeds = [feed for feed in self._feeds if feed.problem or not feed.closed]
        self._feeds.append(Feed(response.read1, timeout_s=options.read_timeout_s, end=response.close))
        return self._feeds[-1]

    def _decode(self, video: Video) -> Iterator[Grabbed]:
        started, patience = False, time.monotonic() + KEYFRAME_WAIT_S
        for packet in video.container.demux(video.stream):
            started = started or packet.is_keyframe or time.monotonic() > patience
            if not started:
                yield Grabbed(decoded=False)
                continue
            for frame in video.decode(packet) if packet.size else video.drain():
                if frame is None:
                    yield Grabbed(corrupt=True)
                else:
                    self._frame = frame
                    yield Grabbed(frame.time, frame.key_frame or frame.pict_type == 1, video.is_corrupt(frame))


def explain(error: Exception, camera: SplitResult) -> str:
    """Turn an error from the operating system or FFmpeg into a message for the camera's owner."""
    host, scheme = camera.hostname or "", camera.scheme.lower()
    if isinstance(error, socket.gaierror):
        return RAW if is_raw(camera) else unresolved(host, error)
    if isinstance(error, UserError):
        return str(error)
    place = f"{host}:{camera.port or PORTS.get(scheme, '')}".rstrip(":")
    words = REASONS.get(getattr(error, "errno", None) or 0)
    if type(error).__name__ == "InvalidDataError" or getattr(error, "errno", None) == errno.EINVAL:
        words = "{} is not an RTSP server" if scheme.startswith("rtsp") else "{} does not send a supported video"
        words += "; check host, port and path"
    elif type(error).__name__ == "EOFError":
        words = "{} closed the connection without sending video; check the address's path"
    return (words or f"the stream from {{}} cannot be read ({getattr(error, 'strerror', None) or error})").format(place)

"""Network cameras. HTTP is asked here, with logins and allowed hosts; FFmpeg reads the answers, and RTSP by itself."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib import request as http
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit

from edgevlm.apps.proxies import proxies_for, proxy_variables
from edgevlm.apps.sources.base import Connection, Grabbed, Image, SourceOptions
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.apps.sources.live import KEYFRAME_WAIT_S
from edgevlm.apps.sources.opencv import CONTAINERS, decode_picture, load_cv2
from edgevlm.errors import SourceError, SourceRefused, UserError
from edgevlm.packages import needed
from edgevlm.runtime.preprocess import MOST_PIXELS

UNMENDABLE = {
    401: "wrong or no user and password (401); they stand in the address, before the host and an at sign",
    403: "not allowed (403); check user, password and path of the address",
    404: "no such stream there (404); check the path of the address",
}
SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "rtmpt", "rtmpts", "rtmpe", "rtmpte", "udp", "tcp", "tls", "rtp", "srt")
PROTOCOLS = f"{','.join(SCHEMES)},srtp,http,https,ffrtmphttp,ffrtmpcrypt"  # what those may open themselves: no files
LOW_LATENCY = {  # docs/guide/cameras.md has what they save
    "rtsp_transport": "tcp",
    "fflags": "nobuffer",
    "flags": "low_delay",
    "analyzeduration": "0",
    "probesize": "32",
}
PICTURES = (b"\xff\xd8", b"\x89PNG")  # as they begin
LARGEST, MORE = 16 << 20, 1 << 20  # bytes of a first picture; and beside four times the one before: more is not a picture


def connect(url: str, options: SourceOptions) -> Connection:
    """Open one connection. Raises SourceError; SourceRefused where the camera's answer will stay the same.

    With ``options.hosts`` only allowed hosts are reached, by redirects and playlists too; FFmpeg resolves nothing, and follows
    redirects inside RTSP only.
    """
    parts, hosts = split_address(url), options.hosts
    if parts.scheme.lower() in ("http", "https"):
        response = _request(url, parts, hosts, options)
        try:
            if response.headers.get_content_type() == "multipart/x-mixed-replace":
                return MultipartConnection(response, options.read_timeout_s)
            return FfmpegConnection(url, options, response)
        except BaseException:
            response.close()
            raise
    if hosts is not None:
        login, at, _ = parts.netloc.rpartition("@")
        address = hosts.resolve(parts.hostname or "", parts.port or 0)
        host = f"[{address}]" if ":" in address else address
        url = parts._replace(netloc=f"{login}{at}{host}" + f":{parts.port}" * (parts.port is not None)).geturl()
    return FfmpegConnection(url, options)


def split_address(url: str) -> SplitResult:
    """Split a network camera's address. Raises SourceRefused if it is invalid."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SourceRefused("that is no address; give SCHEME://HOST:PORT/PATH") from None
    return parts


def _request(url: str, camera: SplitResult, hosts: AllowedHosts | None, options: SourceOptions) -> HTTPResponse:
    """Ask for an address, with Basic or Digest credentials where the camera's has some."""
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
    timeout_s = max(options.open_timeout_s, options.read_timeout_s)  # of one call; the watchdog tells the two apart
    try:
        response: HTTPResponse = opener.open(http.Request(address, headers={"User-Agent": "edgevlm"}), timeout=timeout_s)
        return response
    except HTTPError as error:
        error.close()
        words = UNMENDABLE.get(error.code)
        raise SourceRefused(words) if words else SourceError(f"the camera says {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted ({reason.verify_message}); check this machine's clock, or set SSL_CERT_FILE"
            raise SourceError(why) from None
        if isinstance(reason, TimeoutError):
            raise SourceError("no answer in time (--open-timeout)") from None
        text = reason.strerror if isinstance(reason, OSError) else None
        by = f", through the proxy in {proxy_variables(parts.scheme)}" if hosts is None and parts.scheme in proxies else ""
        raise SourceError((text or f"no answer that can be understood ({type(reason).__name__})") + by) from None


class BoundHandler(http.AbstractHTTPHandler):
    """Opens HTTP addresses, those that redirects name too, on hosts that are allowed."""

    http_request = https_request = http.AbstractHTTPHandler.do_request_

    def __init__(self, hosts: AllowedHosts) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, request: http.Request) -> HTTPResponse:
        def dialled(*arguments: Any, **options: Any) -> HTTPConnection:
            made = (HTTPSConnection if request.type == "https" else HTTPConnection)(*arguments, **options)
            vars(made)["_create_connection"] = self._hosts.connect  # what it dials by, also below TLS
            return made

        return self.do_open(dialled, request)

    https_open = http_open


def load_av() -> Any:
    """Import PyAV, silent. Raises UserError where it is not installed."""
    av, logging = (needed(name, "reading network streams and pipes", "cpu") for name in ("av", "av.logging"))
    logging.set_level(None)  # what FFmpeg prints on its own would name the address
    return av


@dataclass
class Feed:
    """Bytes as PyAV reads a file: those that have come, until a deadline and up to ``largest`` after :meth:`renew`.

    It ends there, and where reading fails; ``problem`` says why. Exceptions would be printed by PyAV.
    """

    take: Callable[[int], bytes]
    largest: float = math.inf
    timeout_s: float = math.inf
    end: Callable[[], None] = lambda: None
    problem: str | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin a picture: the deadline holds for all of it, however slowly its bytes arrive."""
        self._deadline, self._left = time.monotonic() + self.timeout_s, self.largest

    def read(self, count: int) -> bytes:
        late, block = time.monotonic() > self._deadline, b""
        try:
            block = b"" if late or self._left <= 0 else self.take(count)
        except TimeoutError:
            late = True
        except (HTTPException, OSError, ValueError) as error:
            self.problem = getattr(error, "strerror", None) or type(error).__name__
        if late:
            self.problem = f"no picture for {self.timeout_s:g} s"
        elif self._left <= 0:
            self.problem = f"no picture within {self.largest / 2**20:g} MB"
        self._left -= len(block)
        return block

    def close(self) -> None:
        self.closed = True
        self.end()


def open_feed(feed: Feed, kind: str) -> Any:
    """Open pictures of one of FFmpeg's formats, which opens nothing else and reads no more than it needs."""
    options = {"protocol_whitelist": "none", "probesize": "32", "analyzeduration": "0"}
    return load_av().open(
        feed, format=kind, options=options, stream_options=[{"max_pixels": str(MOST_PIXELS)}], buffer_size=4096
    )


class MultipartConnection(Connection):
    """Motion JPEG over HTTP. Each picture is decoded by itself, so its size and kind may change; there are no times."""

    def __init__(self, response: HTTPResponse, timeout_s: float) -> None:
        load_cv2(), load_av()  # raises now if one is not installed
        self._response = response
        self._feed = Feed(response.read1, LARGEST, timeout_s)
        self._packets = self._demux()
        self._data = b""

    def _demux(self) -> Iterator[Any]:
        with open_feed(self._feed, "mpjpeg") as container:
            yield from container.demux(video=0)

    def grab(self) -> Grabbed | None:
        self._feed.renew()
        try:
            packet = next(self._packets, None)
        except load_av().error.FFmpegError:
            packet, self.problem = None, "the stream is no Motion JPEG"
        if packet is None or not packet.size or self._feed.problem:
            self.problem = self._feed.problem or self.problem
            return None
        self._data = bytes(packet)
        self._feed.largest = min(LARGEST, MORE + 4 * packet.size)
        return Grabbed(corrupt=packet.is_corrupt or not self._data.startswith(PICTURES))

    def retrieve(self) -> Image | None:
        return decode_picture(self._data)

    def close(self) -> None:
        self._packets.close()  # type: ignore[attr-defined]
        self._response.close()


class FfmpegConnection(Connection):
    """Decodes one video stream. Timeouts end every call, opening as well as reading.

    A recording behind a URL is played at its own speed and comes to an end. ``response``: HTTP's open answer, which is read;
    FFmpeg opens nothing by itself then, and what a playlist names is asked for here: on public hosts, the camera's own, or
    those of ``options.hosts``. Raises SourceError, in words without the address.
    """

    def __init__(self, url: str, options: SourceOptions, response: HTTPResponse | None = None) -> None:
        self._av, self._options, self._camera, self._response = load_av(), options, split_address(url), response
        self._feeds: list[Feed] = []
        self._container: Any = None
        scheme = self._camera.scheme.lower()
        if response is None and scheme not in SCHEMES:
            raise SourceRefused(f"{scheme}:// is no stream that is read; give http, {', '.join(SCHEMES)}, or a file")
        try:
            self._container = self._open(url, scheme)
            if not self._container.streams.video:
                raise SourceRefused("there is no video in it")
            stream = self._container.streams.video[0]
            stream.codec_context.flags |= self._av.codec.context.Flags.low_delay
        except BaseException:
            self._release()
            raise
        self._recorded = not scheme.startswith("rtsp") and self._container.duration is not None
        self._origin: float | None = None  # of a recording's times
        self._frame: Any = None
        self._pictures = self._decode(stream)

    def grab(self) -> Grabbed | None:
        for feed in self._feeds:
            feed.renew()
        try:
            grabbed = next(self._pictures)
        except (StopIteration, self._av.error.FFmpegError, UserError) as error:
            failed = None if isinstance(error, StopIteration) else getattr(error, "strerror", None) or str(error)
            self.problem = next((feed.problem for feed in self._feeds if feed.problem), failed)
            self.finished = self._recorded and self.problem is None
            return None
        if self._recorded and grabbed.stamp_s is not None:  # wait until it is due
            now = time.monotonic()
            self._origin = now - grabbed.stamp_s if self._origin is None else self._origin
            time.sleep(min(max(0.0, self._origin + grabbed.stamp_s - now), 1.0))
        return grabbed

    def retrieve(self) -> Image | None:
        image: Image = self._frame.to_ndarray(format="rgb24")
        return image

    def close(self) -> None:
        self._pictures.close()  # type: ignore[attr-defined]
        self._release()

    def _release(self) -> None:
        for each in (self._container, self._response, *self._feeds):
            if each is not None:
                each.close()

    def _open(self, url: str, scheme: str) -> Any:
        error, options, began = self._av.error, self._options, time.monotonic()
        if self._response is None:
            allowed = {"protocol_whitelist": PROTOCOLS, "format_whitelist": f"{CONTAINERS},rtsp,rtp"}
            more: dict[str, Any] = {"options": allowed | (LOW_LATENCY if scheme.startswith("rtsp") else {})}
        else:
            url = self._response.geturl()
            listed = {"http_persistent": "0", "http_multiple": "0"}
            allowed = {"protocol_whitelist": "http,https,tls,tcp", "format_whitelist": f"{CONTAINERS},hls"}
            more = {"options": allowed | listed, "io_open": self._feed}
        try:
            return self._av.open(url, timeout=(options.open_timeout_s, options.read_timeout_s), **more)
        except error.FFmpegError as failed:
            codes = {error.HTTPUnauthorizedError: 401, error.HTTPForbiddenError: 403, error.HTTPNotFoundError: 404}
            if (code := codes.get(type(failed))) is not None:
                raise SourceRefused(UNMENDABLE[code]) from None
            if time.monotonic() - began >= options.open_timeout_s:
                raise SourceError(f"no answer within {options.open_timeout_s:g} s (--open-timeout)") from None
            raise SourceError(str(failed.strerror)) from None

    def _feed(self, url: str, *_: object) -> Feed:
        """Open what FFmpeg reads: first the answer, then each address that it names. Raises SourceError."""
        options, response, camera = self._options, self._response, self._camera
        if self._feeds or response is None:
            hosts = options.hosts
            if hosts is None and "http" not in proxies_for(camera.hostname or ""):
                hosts = AllowedHosts(None, private=False, also=camera.hostname or "")
            try:
                response = _request(url, camera, hosts, options)
            except SourceRefused as refused:
                raise SourceRefused(f"its playlist names an address that is not read: {refused}") from None
        self._feeds = [feed for feed in self._feeds if feed.problem or not feed.closed]
        self._feeds.append(Feed(response.read1, timeout_s=options.read_timeout_s, end=response.close))
        return self._feeds[-1]

    def _decode(self, stream: Any) -> Iterator[Grabbed]:
        """Yield pictures as they are decoded; one that cannot be is passed on as corrupt.

        Decoders give nothing before the first keyframe, which may be many seconds away: those packets are passed on too.
        """
        started, patience = False, time.monotonic() + KEYFRAME_WAIT_S
        for packet in self._container.demux(stream):
            started = started or packet.is_keyframe or time.monotonic() > patience
            if not started:
                yield Grabbed(decoded=False)
                continue
            try:
                frames = packet.decode()
            except self._av.error.InvalidDataError:
                if packet.size:  # the last packet, which says that the stream is over, has none
                    yield Grabbed(corrupt=True)
                continue
            for self._frame in frames:
                yield Grabbed(self._frame.time, self._frame.key_frame or self._frame.pict_type == 1, self._frame.is_corrupt)

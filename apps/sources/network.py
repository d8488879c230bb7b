"""Network cameras: Motion JPEG over HTTP is read here, every other URL by FFmpeg."""

from __future__ import annotations

import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from mmap import mmap
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import (
    AbstractHTTPHandler,
    BaseHandler,
    HTTPBasicAuthHandler,
    HTTPDefaultErrorHandler,
    HTTPDigestAuthHandler,
    HTTPErrorProcessor,
    HTTPPasswordMgrWithDefaultRealm,
    HTTPRedirectHandler,
    OpenerDirector,
    Request,
    UnknownHandler,
    build_opener,
)  # fmt: skip

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Connection, Grabbed, SourceOptions
from edgevlm.apps.sources.ffmpeg import WRONG_PASSWORD, FfmpegConnection
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.apps.sources.opencv import decode_picture, load_cv2
from edgevlm.errors import SourceError, SourceRefused

UNMENDABLE = {
    401: WRONG_PASSWORD,
    403: "not allowed (403); check user, password and path of the address",
    404: "no such stream there (404); check the path of the address",
}
OUT_OF_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def connect(url: str, options: SourceOptions) -> Connection:
    """One connection. Raises SourceError; SourceRefused where the camera's answer will stay the same.

    With ``options.hosts`` FFmpeg is given an address that is allowed, or the answer to read: it resolves nothing, and follows
    redirects inside RTSP alone.
    """
    parts, hosts = split_address(url), options.hosts
    if parts.scheme.lower() in ("http", "https"):
        response = _request(parts, options)
        if response.headers.get_content_type() == "multipart/x-mixed-replace":
            return MultipartConnection(response, options.read_timeout_s)
        if hosts is not None:
            return _read_by_ffmpeg(url, options, response)
        response.close()
    elif hosts is not None:
        user, at, _ = parts.netloc.rpartition("@")
        address = hosts.resolve(parts.hostname or "", parts.port or 0)
        port = "" if parts.port is None else f":{parts.port}"
        netloc = f"{user}{at}[{address}]{port}" if ":" in address else f"{user}{at}{address}{port}"
        url = parts._replace(netloc=netloc).geturl()
    return FfmpegConnection(url, options)


def _read_by_ffmpeg(url: str, options: SourceOptions, response: HTTPResponse) -> Connection:
    try:
        return FfmpegConnection(url, options, response)
    except BaseException:
        response.close()
        raise


def split_address(url: str) -> SplitResult:
    """A network camera's address. Raises SourceRefused if it is invalid."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SourceRefused("that is no address; give SCHEME://HOST:PORT/PATH") from None
    return parts


def _request(parts: SplitResult, options: SourceOptions) -> HTTPResponse:
    """Ask for a stream, with Basic or Digest credentials where the address has some."""
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    known = HTTPPasswordMgrWithDefaultRealm()
    if parts.username is not None:
        known.add_password(None, address, unquote(parts.username), unquote(parts.password or ""))
    opener = _opener(options.hosts, HTTPBasicAuthHandler(known), HTTPDigestAuthHandler(known))
    timeout_s = max(options.open_timeout_s, options.read_timeout_s)  # of one call; the watchdog tells the two apart
    try:
        response: HTTPResponse = opener.open(Request(address, headers={"User-Agent": "edgevlm"}), timeout=timeout_s)
        return response
    except HTTPError as error:
        error.close()
        words = UNMENDABLE.get(error.code)
        raise SourceRefused(words) if words else SourceError(f"the camera says {error.code}") from None
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise _untrusted(error.reason) from None
        raise SourceError(_words(error.reason)) from None
    except (OSError, HTTPException, ValueError) as error:
        raise SourceError(_words(error)) from None


class BoundHandler(AbstractHTTPHandler):
    """Opens HTTP addresses, those that redirects name too, on hosts that are allowed."""

    http_request = https_request = AbstractHTTPHandler.do_request_

    def __init__(self, hosts: AllowedHosts) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(self._connection, request)

    def https_open(self, request: Request) -> HTTPResponse:
        return self.do_open(self._tls_connection, request)

    def _connection(self, *arguments: Any, kind: type[HTTPConnection] = HTTPConnection, **options: Any) -> HTTPConnection:
        made = kind(*arguments, **options)
        vars(made)["_create_connection"] = self._hosts.connect  # what it dials by, also below TLS
        return made

    def _tls_connection(self, *arguments: Any, **options: Any) -> HTTPConnection:
        return self._connection(*arguments, kind=HTTPSConnection, **options)


def _opener(hosts: AllowedHosts | None, *handlers: BaseHandler) -> OpenerDirector:
    """What opens HTTP addresses and follows redirects; where hosts are bound, without proxies and other protocols."""
    if hosts is None:
        return build_opener(*handlers)
    opener = OpenerDirector()
    own = BoundHandler(hosts), HTTPRedirectHandler(), HTTPErrorProcessor(), HTTPDefaultErrorHandler(), UnknownHandler()
    for handler in (*own, *handlers):
        opener.add_handler(handler)
    return opener


def _untrusted(error: ssl.SSLCertVerificationError) -> SourceError:
    """Waiting mends a clock that is wrong, as after a start without a network, and nothing else."""
    if error.verify_code in OUT_OF_TIME:
        return SourceError(f"its certificate is not valid now ({error.verify_message}); is this machine's clock right?")
    return SourceRefused(f"its certificate is not trusted ({error.verify_message}); name one that is with SSL_CERT_FILE")


def _words(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return "no answer in time (--open-timeout)"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return f"no answer that can be understood ({type(reason).__name__})"


BLOCK = 1 << 16
LARGEST = 64 << 20  # bytes of one picture: more is not a picture


class MultipartConnection(Connection):
    """Each picture says its own size, so one of another resolution is nothing special; parts carry no time of the camera's."""

    def __init__(self, response: HTTPResponse, timeout_s: float) -> None:
        load_cv2()  # where it is missing, that is said at once
        self._response, self._timeout_s = response, timeout_s
        self._boundary = b"--" + (response.headers.get_boundary() or "").strip('"').removeprefix("--").encode("latin-1")
        self._ahead = mmap(-1, LARGEST + 2 * BLOCK)  # given back when closed, which an allocator does not do for every thread
        self._start = self._end = 0  # of what has come and was not taken yet
        self._jpeg = b""

    def grab(self) -> Grabbed | None:
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._jpeg = self._part()
        except TimeoutError:
            self.problem = f"no picture for {self._timeout_s:g} s"
        except (EOFError, HTTPException, OSError, ValueError) as error:
            self.problem = str(error) if isinstance(error, ValueError) else None
        else:
            return Grabbed(corrupt=not self._jpeg.startswith(b"\xff\xd8"))
        return None

    def retrieve(self) -> NDArray[np.uint8] | None:
        return decode_picture(self._jpeg)

    def close(self) -> None:
        self._response.close()
        self._ahead.close()

    def _part(self) -> bytes:
        """The next part that has a body; by its length where its header has one, else up to the next boundary."""
        self._take(self._find(self._boundary) + len(self._boundary))
        header = self._take(self._find(b"\r\n\r\n") + 4).decode("latin-1")
        for line in header.split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-length" and value.strip().isdigit():
                length = int(value)
                if length > LARGEST:
                    raise ValueError(f"a picture of {length} bytes")
                return self._take(length)
        return self._take(self._find(b"\r\n" + self._boundary))

    def _find(self, mark: bytes) -> int:
        """Where ``mark`` begins in what is ahead; reads until it is there."""
        seen = 0
        while (found := self._ahead.find(mark, self._start + seen, self._end)) < 0:
            seen = max(0, self._end - self._start - len(mark))
            if seen > LARGEST:
                raise ValueError("the stream is no Motion JPEG")
            self._more()
        return found - self._start

    def _take(self, count: int) -> bytes:
        while self._end - self._start < count:
            self._more()
        taken = self._ahead[self._start : self._start + count]
        self._start += count
        return taken

    def _more(self) -> None:
        """Read what has come. The deadline holds for the whole picture, however slowly its bytes trickle in."""
        if time.monotonic() > self._deadline:
            raise TimeoutError
        if not (block := self._response.read1(BLOCK)):
            raise EOFError
        self._ahead.move(0, self._start, self._end - self._start)
        self._start, self._end = 0, self._end - self._start + len(block)
        self._ahead[self._end - len(block) : self._end] = block

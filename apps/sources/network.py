"""Network cameras: HTTP is asked here, with logins and allowed hosts; FFmpeg reads the answers and every other URL."""

from __future__ import annotations

import ssl
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import (
    AbstractHTTPHandler,
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

from edgevlm.apps.sources.base import Connection, SourceOptions
from edgevlm.apps.sources.ffmpeg import WRONG_PASSWORD, FfmpegConnection, MultipartConnection
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.errors import SourceError, SourceRefused

UNMENDABLE = {
    401: WRONG_PASSWORD,
    403: "not allowed (403); check user, password and path of the address",
    404: "no such stream there (404); check the path of the address",
}
OUT_OF_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def connect(url: str, options: SourceOptions) -> Connection:
    """Open one connection. Raises SourceError; SourceRefused where the camera's answer will stay the same.

    With ``options.hosts`` FFmpeg gets an allowed address, or the answer to read: it resolves nothing, and follows redirects
    inside RTSP only.
    """
    parts, hosts = split_address(url), options.hosts
    if parts.scheme.lower() in ("http", "https"):
        response = _request(parts, options)
        try:
            if response.headers.get_content_type() == "multipart/x-mixed-replace":
                return MultipartConnection(response, options.read_timeout_s)
            if hosts is not None:
                return FfmpegConnection(url, options, response)
        except BaseException:
            response.close()
            raise
        response.close()
    elif hosts is not None:
        user, at, _ = parts.netloc.rpartition("@")
        address = hosts.resolve(parts.hostname or "", parts.port or 0)
        port = "" if parts.port is None else f":{parts.port}"
        netloc = f"{user}{at}[{address}]{port}" if ":" in address else f"{user}{at}{address}{port}"
        url = parts._replace(netloc=netloc).geturl()
    return FfmpegConnection(url, options)


def split_address(url: str) -> SplitResult:
    """Split a network camera's address. Raises SourceRefused if it is invalid."""
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
    logins = HTTPBasicAuthHandler(known), HTTPDigestAuthHandler(known)
    opener = build_opener(*logins)
    if options.hosts is not None:  # no proxies and no other protocols
        opener = OpenerDirector()
        others = HTTPRedirectHandler(), HTTPErrorProcessor(), HTTPDefaultErrorHandler(), UnknownHandler()
        for handler in (BoundHandler(options.hosts), *others, *logins):
            opener.add_handler(handler)
    timeout_s = max(options.open_timeout_s, options.read_timeout_s)  # of one call; the watchdog tells the two apart
    try:
        response: HTTPResponse = opener.open(Request(address, headers={"User-Agent": "edgevlm"}), timeout=timeout_s)
        return response
    except HTTPError as error:
        error.close()
        words = UNMENDABLE.get(error.code)
        raise SourceRefused(words) if words else SourceError(f"the camera says {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise _untrusted(reason) from None
        if isinstance(reason, TimeoutError):
            raise SourceError("no answer in time (--open-timeout)") from None
        text = reason.strerror if isinstance(reason, OSError) else None
        raise SourceError(text or f"no answer that can be understood ({type(reason).__name__})") from None


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


def _untrusted(error: ssl.SSLCertVerificationError) -> SourceError:
    """Waiting mends a wrong clock, as after a start without a network, and nothing else."""
    if error.verify_code in OUT_OF_TIME:
        return SourceError(f"its certificate is not valid now ({error.verify_message}); is this machine's clock right?")
    return SourceRefused(f"its certificate is not trusted ({error.verify_message}); name one that is with SSL_CERT_FILE")

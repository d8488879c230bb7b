"""Network cameras: a URL becomes a connection, Motion JPEG over HTTP read here, everything else by FFmpeg."""

from __future__ import annotations

import ssl
from http.client import HTTPException, HTTPResponse
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import (
    HTTPBasicAuthHandler,
    HTTPDigestAuthHandler,
    HTTPPasswordMgrWithDefaultRealm,
    Request,
    build_opener,
)  # fmt: skip

from edgevlm.apps.sources.base import Connection, Source, SourceOptions, SourceRefused, mask_credentials
from edgevlm.apps.sources.ffmpeg import WRONG_PASSWORD, FfmpegConnection
from edgevlm.apps.sources.live import LiveSource
from edgevlm.apps.sources.multipart import MultipartConnection
from edgevlm.errors import SourceError

UNMENDABLE = {
    401: WRONG_PASSWORD,
    403: "not allowed (403); check user, password and path of the address",
    404: "no such stream there (404); check the path of the address",
}
OUT_OF_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def open_network(url: str, options: SourceOptions) -> Source:
    """A live source for an RTSP, RTSPS, HTTP(S) or other URL that FFmpeg reads. Raises SourceError, one line."""
    return LiveSource(mask_credentials(url), lambda: connect(url, options), options)


def connect(url: str, options: SourceOptions) -> Connection:
    """One connection. Raises SourceError; SourceRefused where the camera's answer will stay the same."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SourceRefused("that is no address; give SCHEME://HOST:PORT/PATH") from None
    if parts.scheme.lower() in ("http", "https"):
        response = _request(parts, options)
        if response.headers.get_content_type() == "multipart/x-mixed-replace":
            return MultipartConnection(response, options.read_timeout_s)
        response.close()
    return FfmpegConnection(url, options)


def _request(parts: SplitResult, options: SourceOptions) -> HTTPResponse:
    """Ask for a stream, with Basic or Digest credentials where the address has some."""
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    known = HTTPPasswordMgrWithDefaultRealm()
    if parts.username is not None:
        known.add_password(None, address, unquote(parts.username), unquote(parts.password or ""))
    opener = build_opener(HTTPBasicAuthHandler(known), HTTPDigestAuthHandler(known))
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

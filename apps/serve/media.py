"""Read a question's pictures and videos, from allowed sources only and with limits on decoding."""

from __future__ import annotations

import base64
import io
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from edgevlm.apps.hosts import AllowedHosts, is_network
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.sources import picture
from edgevlm.apps.sources.base import Image
from edgevlm.apps.sources.video import Video, load_av, open_video, spread
from edgevlm.errors import SourceError, SourceRefused, UserError

MAX_PIXELS = 1 << 24  # maximum number of pixels in a picture or a video frame
FETCH_S = 10.0
DECODE_S = 10.0
VIDEO = "use edgevlm://NAME, data:video/...;base64,... or file:///PATH of a video in one of server.media_folders"
BASE64 = re.compile(r"[\w+/=\s-]{64,}")
_ONE_AT_A_TIME = threading.Lock()  # held while decoding, because a picture may take 50 MB before it is scaled down


def read_picture(url: str, settings: ServerSettings) -> Image:
    """Read a picture from a ``data:`` or ``http(s):`` URL. Returns RGB ``[H, W, 3]``. Raises UserError."""
    if url[:6].lower().startswith(("http:", "https:")):
        return decode_picture(_fetch(url, settings))
    return decode_picture(_inline(url, "must be data:image/...;base64,... or an http address"))


def decode_picture(data: bytes) -> Image:
    """Decode a picture. Returns RGB ``[H, W, 3]``. Raises UserError."""
    with _ONE_AT_A_TIME:
        return picture.decode_picture(data, MAX_PIXELS)


def read_video(url: str, settings: ServerSettings, count: int) -> list[Image]:
    """Return up to ``count`` evenly spaced frames of a ``data:`` video or of a file in an allowed folder.

    Each frame is RGB ``[H, W, 3]``. Symbolic links are resolved before the folder is checked. A missing file and a forbidden
    file raise the same UserError.
    """
    opened: Callable[[], Video]
    if "://" in url[:16]:
        opened = partial(open_video, _allowed_file(url, settings), most_pixels=MAX_PIXELS, threads="NONE")
    else:
        data = _inline(url, VIDEO)
        opened = lambda: Video(io.BytesIO(data), MAX_PIXELS, "NONE")  # noqa: E731
    with _ONE_AT_A_TIME:
        try:
            return spread(opened, count, DECODE_S)
        except (load_av().error.FFmpegError, OSError, ValueError):  # OSError and ValueError come from reading the file
            raise UserError("not a readable video") from None


def _inline(url: str, wanted: str) -> bytes:
    """Decode a base64 ``data:`` URL or plain base64, standard or URL-safe, with or without padding. Raises UserError."""
    head, text = url.split(",", 1) if "," in url[:256] else ("data:;base64" if BASE64.fullmatch(url[:256]) else "", url)
    if not re.fullmatch(r"(?is)\s*data:[^,]*;\s*base64\s*", head):
        raise UserError(wanted)
    text = "".join(unquote(text).split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise UserError("invalid base64; encode the file's bytes again") from None


def _allowed_file(url: str, settings: ServerSettings) -> Path:
    refused = UserError(VIDEO)
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path, errors="strict"))
        real, roots = path.resolve(strict=True), [Path(folder).resolve() for folder in settings.media_folders]
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or ".." in path.parts or not real.is_file():
            raise refused
        if not any(real.is_relative_to(root) for root in roots):
            raise refused
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    return real


def _fetch(url: str, settings: ServerSettings) -> bytes:
    """Fetch a picture from an allowed host, at the IP address that was checked, without following redirects."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
        is_listed = is_network(host) if host else False
    except ValueError:
        raise UserError("not a valid URL") from None
    if parts.username is not None or not host or not url.isascii() or any(char <= " " for char in url):
        raise UserError("must be an address without credentials or spaces")
    if (host if port is None else f"{host}:{port}") not in {each.lower() for each in settings.media_hosts}:
        raise UserError("fetching from this host is not allowed; send the picture itself or add the host to server.media_hosts")
    # an IP address in media_hosts may be private; a host name must resolve to public addresses unless media_private is set
    hosts = AllowedHosts([host] if settings.media_private or is_listed else None, private=False)
    late = UserError(f"the picture could not be fetched from {host} within {FETCH_S:g} s")
    end, data = time.monotonic() + FETCH_S, bytearray()
    try:
        address = httpx.URL(url).copy_with(host=hosts.resolve(host, port or 0))
        named: dict[str, Any] = {"headers": {"host": parts.netloc}, "extensions": {"sni_hostname": host}}
        with httpx.Client(timeout=FETCH_S, trust_env=False) as client, client.stream("GET", address, **named) as response:
            if response.status_code != 200:
                raise UserError(f"{host} returned {response.status_code} for the picture; redirects are not followed")
            for piece in response.iter_raw():
                data += piece
                if len(data) > settings.max_body:
                    raise UserError(f"the picture is larger than {settings.max_body} bytes")
                if time.monotonic() > end:
                    raise late
    except SourceRefused:
        raise UserError(f"{host} is a private address; the operator can allow it with server.media_private") from None
    except (OSError, SourceError, httpx.HTTPError, httpx.InvalidURL):
        raise late from None
    return bytes(data)

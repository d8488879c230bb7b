"""Pictures and videos in a question: what may be fetched or opened, and how much of it is decoded."""

from __future__ import annotations

import base64
import io
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import av
import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.sources.hosts import AllowedHosts, is_network
from edgevlm.errors import SourceError, SourceRefused, UserError

MAX_PIXELS = 1 << 24  # of a picture or of a video's frame
MAX_SIDE = 1 << 14
FETCH_S = 10.0  # that a picture may take to come
DECODE_S = 10.0  # that a video's frames may take
PICTURES = ("JPEG", "PNG", "WEBP", "GIF")
VIDEOS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts"  # no playlists, which name other files
_ONE_AT_A_TIME = threading.Lock()  # over decoding: a picture may take 50 MB before it is made small


def read_picture(url: str, settings: ServerSettings) -> NDArray[np.uint8]:
    """The picture at a ``data:`` or ``http(s):`` address, RGB ``[H, W, 3]``. Raises UserError for what is not allowed."""
    if url.lower().startswith(("http:", "https:")):
        return decode_picture(_fetch(url, settings))
    head, _, data = url.partition(",")
    if not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise UserError("give a picture as data:image/...;base64,... or at an http address")
    try:
        return decode_picture(base64.b64decode(data, validate=True))
    except ValueError:
        raise UserError("the picture's base64 is broken") from None


def read_video(url: str, settings: ServerSettings, count: int) -> list[NDArray[np.uint8]]:
    """Return up to ``count`` frames, evenly spaced, RGB ``[H, W, 3]``, of a ``file:`` in an allowed folder. Raises UserError.

    Links are resolved first; a missing file is refused like a forbidden one.
    """
    refused = UserError("give a stream, edgevlm://NAME, or file:///.. of a video in one of server.media_folders")
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
    with _ONE_AT_A_TIME:
        try:
            return _decode_video(real, count)
        except (av.error.FFmpegError, ValueError, IndexError, ZeroDivisionError, OSError):
            raise UserError("this is no video that can be read") from None


def decode_picture(data: bytes) -> NDArray[np.uint8]:
    """A JPEG, PNG, WebP or GIF as RGB ``[H, W, 3]``; its size is looked at before it is decoded. Raises UserError."""
    with _ONE_AT_A_TIME:
        try:
            with Image.open(io.BytesIO(data), formats=PICTURES) as image:
                _check_size(image.width, image.height)
                image.draft("RGB", (1024, 1024))
                return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except UserError:
            raise
        except Image.DecompressionBombError:
            raise UserError(f"a picture has {MAX_PIXELS:,} pixels at most") from None
        except Exception:  # Pillow's decoders raise whatever comes to them
            raise UserError("this is no picture that can be read; give JPEG, PNG, WebP or GIF") from None


def _check_size(width: int, height: int) -> None:
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise UserError(f"{width} x {height} pixels are too many; {MAX_PIXELS:,} are allowed, and {MAX_SIDE:,} a side")


def _fetch(url: str, settings: ServerSettings) -> bytes:
    """GET from an allowed host, at the address that was checked; redirects are not followed."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
        is_listed = is_network(host) if host else False
    except ValueError:
        raise UserError("this is no address") from None
    if parts.username is not None or not host or not url.isascii() or any(char <= " " for char in url):
        raise UserError("give an address without credentials and spaces")
    if (host if port is None else f"{host}:{port}") not in {each.lower() for each in settings.media_hosts}:
        raise UserError("pictures are not fetched from this host; send the picture itself, or add it to server.media_hosts")
    # an address that is listed as such is the operator's choice; a name leads to public ones alone
    hosts = AllowedHosts([host] if settings.media_private or is_listed else None, private=False)
    late = UserError(f"the picture did not come from {host} within {FETCH_S:g} s")
    end, data = time.monotonic() + FETCH_S, bytearray()
    try:
        address = httpx.URL(url).copy_with(host=hosts.resolve(host, port or 0))
        named: dict[str, Any] = {"headers": {"host": parts.netloc}, "extensions": {"sni_hostname": host}}
        with httpx.Client(timeout=FETCH_S, trust_env=False) as client, client.stream("GET", address, **named) as response:
            if response.status_code != 200:
                raise UserError(f"the picture's host answered {response.status_code}; redirects are not followed")
            for piece in response.iter_raw():
                data += piece
                if len(data) > settings.max_body:
                    raise UserError(f"the picture has more than {settings.max_body} bytes")
                if time.monotonic() > end:
                    raise late
    except SourceRefused:
        raise UserError(f"{host} is a private address; the operator can allow it with server.media_private") from None
    except (OSError, SourceError, httpx.HTTPError, httpx.InvalidURL):
        raise late from None
    return bytes(data)


def _decode_video(path: Path, count: int) -> list[NDArray[np.uint8]]:
    until, frames = time.monotonic() + DECODE_S, list[NDArray[np.uint8]]()
    with av.open(str(path), options={"format_whitelist": VIDEOS, "protocol_whitelist": "file"}) as container:
        video = container.streams.video[0]
        _check_size(video.codec_context.width, video.codec_context.height)
        video.thread_type = "NONE"
        length = float(video.duration * video.time_base) if video.duration else (container.duration or 0) / av.time_base
        if length <= 0:
            raise UserError("this video does not give its duration")
        start = float((video.start_time or 0) * video.time_base)
        for index in range(count):
            wanted, last = start + (index + 0.5) * length / count, None
            container.seek(int(wanted / video.time_base), stream=video)
            for frame in container.decode(video):
                if time.monotonic() > until:
                    raise UserError(f"this video takes more than {DECODE_S:g} s to decode")
                _check_size(frame.width, frame.height)
                last = frame
                if frame.time is None or frame.time >= wanted:
                    break
            if last is not None:
                frames.append(last.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
    return frames

"""Pictures and videos in a question: what may be fetched or opened, and how much of it is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO
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
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return decode_picture(_inline(url))
    if scheme in ("http", "https"):
        return decode_picture(_fetch(url, settings))
    raise UserError("give a picture as data:image/...;base64,... or at an http address")


def read_video(url: str, settings: ServerSettings, count: int, fps: float | None) -> list[NDArray[np.uint8]]:
    """``count`` frames at most of the file at a ``file:`` address, evenly over it, RGB ``[H, W, 3]``. Raises UserError."""
    if not url.lower().startswith("file:"):
        raise UserError("give a stream of this server, edgevlm://NAME, or a video in a folder the server allows, file:///...")
    with _open_allowed(url, settings.media_folders) as file, _ONE_AT_A_TIME:
        try:
            return _decode_video(file, count, fps)
        except (av.error.FFmpegError, ValueError, IndexError, ZeroDivisionError):
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


def _inline(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UserError("give a picture as data:image/...;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise UserError("the picture's base64 is broken") from None


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
    end, data = time.monotonic() + FETCH_S, b""
    try:
        address = httpx.URL(url).copy_with(host=hosts.resolve(host, port or 0))
        named: dict[str, Any] = {"headers": {"host": parts.netloc}, "extensions": {"sni_hostname": host}}
        with httpx.Client(timeout=FETCH_S, trust_env=False) as client, client.stream("GET", address, **named) as response:
            if response.status_code != 200:
                follows = "; redirects are not followed" if response.has_redirect_location else ""
                raise UserError(f"the picture's host answered {response.status_code}{follows}")
            for piece in response.iter_raw():
                data += piece
                if len(data) > settings.max_body:
                    raise UserError(f"the picture has more than {settings.max_body} bytes")
                if time.monotonic() > end:
                    raise late
    except SourceRefused:
        raise UserError(
            f"{host} is a private address; the server fetches nothing there unless server.media_private is set"
        ) from None
    except (OSError, SourceError, httpx.HTTPError, httpx.InvalidURL):
        raise late from None
    return data


def _open_allowed(url: str, folders: list[str]) -> BinaryIO:
    """A regular file within the folders, also after links are followed. The same refusal whether it is there or not."""
    refused = UserError("there is no such video in a folder the server allows (server.media_folders)")
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path, errors="strict"))
        if parts.netloc not in ("", "localhost") or not path.is_absolute() or ".." in path.parts:
            raise refused
        real, roots = path.resolve(strict=True), [Path(folder).resolve() for folder in folders]
        if not any(real.is_relative_to(root) for root in roots) or not real.is_file():
            raise refused
        opened = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    file = os.fdopen(opened, "rb")
    now = Path(os.readlink(f"/proc/self/fd/{opened}"))  # what was opened, whatever was swapped meanwhile
    if stat.S_ISREG(os.fstat(opened).st_mode) and any(now.is_relative_to(root) for root in roots):
        return file
    file.close()
    raise refused


def _decode_video(file: BinaryIO, count: int, fps: float | None) -> list[NDArray[np.uint8]]:
    until = time.monotonic() + DECODE_S
    with av.open(file, options={"format_whitelist": VIDEOS, "protocol_whitelist": ""}) as container:
        video = container.streams.video[0]
        _check_size(video.codec_context.width, video.codec_context.height)
        video.thread_type = "NONE"
        length = float(video.duration * video.time_base) if video.duration else (container.duration or 0) / av.time_base
        if length <= 0:
            raise UserError("this video does not say how long it is")
        count = count if fps is None else min(count, max(1, int(length * fps)))
        start = float((video.start_time or 0) * video.time_base)
        frames: list[NDArray[np.uint8]] = []
        for index in range(count):
            wanted = start + (index + 0.5) * length / count
            container.seek(int(wanted / video.time_base), stream=video)
            last: av.VideoFrame | None = None
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

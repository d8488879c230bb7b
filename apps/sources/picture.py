"""Decode pictures from folders, cameras and requests."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import numpy as np

from edgevlm.apps.sources.base import Image
from edgevlm.errors import SourceError
from edgevlm.packages import needs
from edgevlm.runtime.preprocess import MOST_EDGE, MOST_PIXELS

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # first bytes of each format
BEGIN = re.compile(JPEG + b"|" + PNG)
END = b"\xff\xd9"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")


def decode_picture(data: bytes, most_pixels: int = MOST_PIXELS) -> Image:
    """Decode a picture to uint8 RGB ``[H, W, 3]``.

    Applies the EXIF rotation, puts transparent pictures on white, and scales 16-bit pictures to 8 bits. Raises SourceError for
    data that is not an image, is damaged or has too many pixels (checked before decoding).
    """
    with needs("reading pictures", "cpu"):
        from PIL import Image as pillow
        from PIL import ImageOps
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as opened:
            check_size(opened.width, opened.height, most_pixels)
            picture = ImageOps.exif_transpose(opened)
    except SourceError:
        raise
    except pillow.DecompressionBombError:
        raise SourceError(f"the picture is too large; at most {most_pixels:,} pixels are allowed") from None
    except Exception:  # Pillow's decoders may raise any exception
        raise SourceError("not a readable image; give JPEG, PNG, WebP or GIF") from None
    if picture.mode.startswith("I"):  # 16-bit pictures come from thermal or depth cameras
        grey = np.clip(np.asarray(picture).astype(np.int32) >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = pillow.alpha_composite(pillow.new("RGBA", picture.size, "white"), picture)
    return np.asarray(picture.convert("RGB"))


def try_decoding(data: bytes) -> Image | None:
    """Decode a camera's picture. Return None if the picture is damaged or too large."""
    try:
        return decode_picture(data)
    except SourceError:
        return None


def check_size(width: int, height: int, most_pixels: int = MOST_PIXELS) -> None:
    """Raise SourceError if a picture is empty or too large to decode."""
    if not (0 < width <= MOST_EDGE and 0 < height <= MOST_EDGE and width * height <= most_pixels):
        raise SourceError(
            f"picture size {width} x {height} not supported; use at most {most_pixels:,} pixels, {MOST_EDGE:,} a side"
        )


def split_pictures(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield each JPEG or PNG in a stream of bytes as soon as it is complete.

    A picture that was cut short yields empty bytes. Other data between pictures, such as multipart headers, is skipped.
    ``read``: returns empty bytes at the stream's end.
    """
    data, size = bytearray(), 1 << 16
    while block := read(size):
        data += block
        while begun := BEGIN.search(data):
            find_end, at, whole = (_jpeg_end, 2, False) if begun[0] == JPEG else (_png_end, len(PNG), False)
            del data[: begun.start()]
            seen = 0
            while not whole:
                at, whole = find_end(data, at, seen)
                if whole or at < 0:
                    break
                if not (block := read(size)):
                    yield b""
                    return
                seen = len(data)
                data += block
            yield bytes(data[:at]) if whole else b""
            del data[: at if whole else -at]
        if len(data) > size:
            del data[: -len(PNG)]


def _jpeg_end(data: bytearray, at: int, seen: int) -> tuple[int, bool]:
    """Return ``(end, True)``, or ``(offset to continue from, False)`` if the JPEG is incomplete.

    If another JPEG begins before the end, return its offset as a negative number, and False. ``at``: the offset to
    search from. ``seen``: the number of bytes already searched.
    """
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] not in (0xD8, 0xD9, 0xDA):
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    if at + 4 > len(data):
        return at, False
    look = max(at, seen - len(JPEG))
    end, other = data.find(END, look), data.find(JPEG, look)  # the scan's data cannot contain these markers
    if other >= 0 and not 0 <= end < other:
        return -other, False
    return (end + 2, True) if end >= 0 else (at, False)


def _png_end(data: bytearray, at: int, seen: int) -> tuple[int, bool]:
    while at + 8 <= len(data):
        name, at = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4], "big")
        if name == b"IEND":
            return (at, True) if at <= len(data) else (at - 12, False)
    return at, False

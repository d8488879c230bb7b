"""YUV4MPEG2, the uncompressed video of ``ffmpeg -f yuv4mpegpipe``: a header line, then planes after each FRAME line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.bytestream import ByteStream
from edgevlm.apps.sources.opencv import load_cv2
from edgevlm.errors import SourceError

MAGIC = b"YUV4MPEG2"
NEWLINE = re.compile(b"\n")
LINE = 256  # bytes of a header line at most
SIDE = 16384  # pixels at most: a damaged header asks for no more memory than this
FALLBACK_FPS = 25.0  # for a header that declares no rate

CHROMA = {  # colour space: horizontal and vertical subsampling; None: no chroma
    "420": (2, 2), "420jpeg": (2, 2), "420mpeg2": (2, 2), "420paldv": (2, 2), "411": (4, 1), "422": (2, 1), "444": (1, 1),
    "mono": None,
}  # fmt: skip

KR, KB = 0.299, 0.114  # BT.601's weights of red and blue in luma


@dataclass(frozen=True, slots=True)
class Header:
    """Of a stream: luma size in pixels, frames a second, colour space, and whether luma spans 0-255 (else 16-235)."""

    width: int
    height: int
    fps: float
    colour: str
    full_range: bool

    @property
    def chroma(self) -> tuple[int, int]:
        """Height and width of a chroma plane; 0, 0 for gray."""
        steps = CHROMA[self.colour]
        return (-(-self.height // steps[1]), -(-self.width // steps[0])) if steps else (0, 0)

    @property
    def frame_bytes(self) -> int:
        rows, columns = self.chroma
        return self.width * self.height + 2 * rows * columns


def parse_header(line: bytes) -> Header:
    """The header line, without its newline. Raises SourceError for one that is damaged or of a format that is not read."""
    tags: dict[str, str] = {}
    extensions = []
    for field in line.decode("ascii", "replace").split()[1:]:
        if field[0] == "X":
            extensions.append(field[1:])
        else:
            tags[field[0]] = field[1:]
    try:
        width, height = int(tags["W"]), int(tags["H"])
        rate = Fraction(*map(int, tags.get("F", "0:0").split(":"))) if tags.get("F", "0:0") != "0:0" else Fraction(0)
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        raise SourceError("stdin: its YUV4MPEG2 header is damaged; it needs W, H and a rate like F25:1") from None
    if not (0 < width <= SIDE and 0 < height <= SIDE and 0 <= rate < 10_000):
        raise SourceError(f"stdin: a YUV4MPEG2 stream of {width}x{height} at {float(rate):g} fps is not read")
    colour = tags.get("C", "420")
    if colour not in CHROMA:
        raise SourceError(f"stdin: colour space {colour} is not read ({', '.join(CHROMA)} are); ffmpeg -pix_fmt yuv420p")
    return Header(width, height, float(rate) or FALLBACK_FPS, colour, "COLORRANGE=FULL" in extensions)


class Y4mDecoder:
    """Frames of a stream whose next bytes are MAGIC. Each is read into one buffer, which is used again."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        end = stream.find(NEWLINE, limit=LINE)
        if end < 0:
            raise SourceError("stdin: its YUV4MPEG2 header has no end; the stream is damaged or cut short")
        self.header = parse_header(stream.take(end + 1)[:-1])
        self.fps = self.header.fps
        self._planes = np.empty(self.header.frame_bytes, np.uint8)
        self._cv2 = load_cv2()

    def advance(self) -> bool:
        """Read the next frame; False at the end. Raises SourceError for a stream that is damaged or cut short."""
        if not self._stream.peek(1):
            return False
        end = self._stream.find(NEWLINE, limit=LINE)
        line = self._stream.take(end + 1)
        if not line.startswith(b"FRAME"):
            raise SourceError("stdin: a YUV4MPEG2 frame does not begin where it should; the stream is damaged or cut short")
        if self._stream.fill(self._planes.data) < len(self._planes):
            raise SourceError("stdin: ended in the middle of a frame; the stream was cut short")
        return True

    def image(self) -> NDArray[np.uint8]:
        """The frame that was read, uint8 RGB ``[H, W, 3]``, by BT.601; chroma is repeated over the pixels it is for."""
        header, cv2 = self.header, self._cv2
        steps = CHROMA[header.colour]
        if steps is None:
            return np.asarray(cv2.cvtColor(self._planes.reshape(header.height, header.width), cv2.COLOR_GRAY2RGB))
        if steps == (2, 2) and not (header.width % 2 or header.height % 2 or header.full_range):
            packed = self._planes.reshape(header.height * 3 // 2, header.width)
            return np.asarray(cv2.cvtColor(packed, cv2.COLOR_YUV2RGB_I420))
        planes = full_planes(self._planes, header, *steps)
        return np.asarray(cv2.transform(cv2.merge(planes), rgb_matrix(header.full_range)))


def full_planes(data: NDArray[np.uint8], header: Header, across: int, down: int) -> list[NDArray[np.uint8]]:
    """Y, Cb and Cr of a frame's bytes, each ``[H, W]``; a chroma sample stands for ``across`` x ``down`` pixels."""
    pixels = header.width * header.height
    whole = [plane.repeat(down, 0).repeat(across, 1) for plane in data[pixels:].reshape(2, *header.chroma)]
    return [data[:pixels].reshape(header.height, header.width), *(plane[: header.height, : header.width] for plane in whole)]


def rgb_matrix(full_range: bool) -> NDArray[np.float64]:
    """``[3, 4]``: R, G and B of Y, Cb, Cr and 1, by BT.601 (ITU-R BT.601-7, 2.5)."""
    kg = 1 - KR - KB
    y, c, black = (1.0, 1.0, 0) if full_range else (255 / 219, 255 / 224, 16)
    of_red, of_blue = 2 * (1 - KR) * c, 2 * (1 - KB) * c
    matrix = np.array([[y, 0, of_red], [y, -of_blue * KB / kg, -of_red * KR / kg], [y, of_blue, 0]])
    return np.column_stack([matrix, -matrix @ (black, 128, 128)])

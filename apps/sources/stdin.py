"""Video from a pipe: ``ffmpeg ... -f yuv4mpegpipe - | edgevlm run --camera -``, or Motion JPEG."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Frame, FrameSampler, Source, StageTimer, State
from edgevlm.apps.sources.opencv import decode_picture, load_cv2
from edgevlm.errors import SourceError

POLL_S = 0.2  # how long a read waits before it looks whether the source was closed
BLOCK = 1 << 16
LONGEST = 4  # bytes that are looked for


class ByteStream:
    """Reads a descriptor, which it does not own. Only what :meth:`peek` and :meth:`find` looked ahead for is buffered."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ahead = bytearray()
        self.closed = False

    def fill(self, view: memoryview) -> int:
        """Read into ``view`` until it is full; returns the bytes read, fewer only at the end."""
        done = min(len(self._ahead), len(view))
        view[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < len(view) and self._wait():
            if not (got := os.readv(self._descriptor, [view[done:]])):
                break
            done += got
        return done

    def peek(self, count: int, start: int = 0) -> bytes:
        """``count`` bytes from ``start`` bytes ahead, left to be read; fewer only at the end."""
        while len(self._ahead) < start + count and self._more():
            pass
        return bytes(self._ahead[start : start + count])

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer only at the end."""
        found = self.peek(count)
        del self._ahead[: len(found)]
        return found

    def find(self, wanted: re.Pattern[bytes], start: int = 0, limit: int = sys.maxsize) -> int:
        """Where ``wanted`` (LONGEST bytes at most) begins, looked for from ``start`` bytes ahead to ``limit``; -1: nowhere."""
        while not (found := wanted.search(self._ahead, start, limit)):
            start = max(start, len(self._ahead) - LONGEST + 1)
            if len(self._ahead) >= limit or not self._more():
                return -1
        return found.start()

    def close(self) -> None:
        """End every read, within POLL_S; from any thread."""
        self.closed = True

    def _more(self) -> bool:
        if not self._wait():
            return False
        block = os.read(self._descriptor, BLOCK)
        self._ahead += block
        return bool(block)

    def _wait(self) -> bool:
        """Until there is something to read; False once closed."""
        while not self.closed:
            if select.select([self._descriptor], [], [], POLL_S)[0]:
                return True
        return False


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
    full = [plane.repeat(down, 0).repeat(across, 1) for plane in data[pixels:].reshape(2, *header.chroma)]
    return [data[:pixels].reshape(header.height, header.width), *(plane[: header.height, : header.width] for plane in full)]


def rgb_matrix(full_range: bool) -> NDArray[np.float64]:
    """``[3, 4]``: R, G and B of Y, Cb, Cr and 1, by BT.601 (ITU-R BT.601-7, 2.5)."""
    kg = 1 - KR - KB
    y, c, black = (1.0, 1.0, 0) if full_range else (255 / 219, 255 / 224, 16)
    of_red, of_blue = 2 * (1 - KR) * c, 2 * (1 - KB) * c
    matrix = np.array([[y, 0, of_red], [y, -of_blue * KB / kg, -of_red * KR / kg], [y, of_blue, 0]])
    return np.column_stack([matrix, -matrix @ (black, 128, 128)])


START = re.compile(rb"\xff\xd8\xff")
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # but for stuffing, filling and restarts, which stand inside a scan
LARGEST = 64 << 20  # bytes of one picture
BETWEEN = 1 << 20  # bytes from one picture to the next, at most
END = 0xD9


class MjpegDecoder:
    """Frames of a stream of JPEG pictures. It carries no times: ``fps`` is what it is taken for."""

    def __init__(self, stream: ByteStream, fps: float) -> None:
        self.fps = fps
        self._stream = stream
        self._picture = b""

    def advance(self) -> bool:
        """Read the next picture; False at the end. Raises SourceError for a stream that is damaged or cut short."""
        start = self._stream.find(START, limit=BETWEEN)
        if start < 0 and len(self._stream.peek(BETWEEN)) == BETWEEN:
            raise SourceError("stdin: no JPEG picture for a megabyte; the stream is damaged")
        if start < 0:
            return False
        self._stream.take(start)
        self._picture = self._stream.take(self._length())
        return True

    def image(self) -> NDArray[np.uint8] | None:
        """The picture that was read, uint8 RGB ``[H, W, 3]``; None where it is damaged."""
        return decode_picture(self._picture)

    def _length(self) -> int:
        """Of the picture that begins here. Walks from segment to segment: a thumbnail in one of them has an end of its own."""
        at = 2
        while (at := self._stream.find(MARKER, at, LARGEST)) >= 0:
            marker = self._stream.peek(4, at)
            if marker[1] == END:
                return at + 2
            at += 2 + int.from_bytes(marker[2:], "big")
        raise SourceError("stdin: ended in the middle of a picture; the stream was cut short or is damaged")


MJPEG_FPS = 25.0  # of a stream that carries no times, as ffmpeg takes it
LOOK = 4096  # bytes in which the first picture of Motion JPEG begins


class StdinSource(Source):
    """Waits for its reader, and the pipe makes whoever writes it wait; times are frame numbers over the stream's rate.

    ``rate``: of Motion JPEG, frames a second. Frames that are not sampled are read and not decoded.
    """

    name = "stdin"

    def __init__(self, fps: float | None, rate: float | None = None, descriptor: int | None = None) -> None:
        self._stream = ByteStream(_stdin() if descriptor is None else descriptor)
        self._decoder = open_decoder(self._stream, rate or MJPEG_FPS)
        self._sampler = FrameSampler(fps)
        self._frames = self._given = 0

    def read(self) -> Frame | None:
        timer = StageTimer()
        while self.state not in (State.ENDED, State.FAILED) and self._advance():
            self.state = State.RUNNING
            time_s = (self._frames - 1) / self._decoder.fps
            if not self._sampler.wants(time_s):
                continue
            timer.captured()
            image = self._decoder.image()
            timer.mark("decode")
            if image is not None:
                self._given += 1
                return Frame(image, time_s, timer=timer)
            self.drops["corrupt"] += 1
        if not self._given and self.state not in (State.ENDED, State.FAILED):
            self.state = State.FAILED
            raise SourceError("stdin: ended before there was a frame that can be read")
        self.close()
        return None

    def _advance(self) -> bool:
        try:
            more = self._decoder.advance()
        except SourceError:
            if self._stream.closed:
                return False
            self.state = State.FAILED
            raise
        self._frames += more
        return more

    def skip(self, time_s: float, seen: Callable[[Frame], object] | None = None) -> bool:
        return False  # whoever writes to the pipe decides where it begins

    def interrupt(self) -> None:
        self._stream.close()

    def close(self) -> None:
        super().close()
        self._stream.close()


def open_decoder(stream: ByteStream, rate: float) -> Y4mDecoder | MjpegDecoder:
    """The decoder of what the stream begins with. Raises SourceError for an empty stream and for one of another kind."""
    begin = stream.peek(len(MAGIC))
    if not begin:
        raise SourceError(
            "stdin: is empty; pipe video into it, like: ffmpeg -i SOURCE -f yuv4mpegpipe - | edgevlm run --camera -"
        )
    if begin == MAGIC:
        return Y4mDecoder(stream)
    if stream.find(START, limit=LOOK) >= 0:
        return MjpegDecoder(stream, rate)
    raise SourceError("stdin: neither YUV4MPEG2 nor Motion JPEG; write it with ffmpeg -f yuv4mpegpipe or -f mjpeg")


def _stdin() -> int:
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise SourceError("stdin: is closed; pipe video into it") from None
    if os.isatty(descriptor):
        raise SourceError("stdin: is a terminal; pipe video into it, like: edgevlm run --camera - < clip.y4m")
    return descriptor

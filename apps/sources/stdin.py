"""Video from a pipe: ``ffmpeg ... -f yuv4mpegpipe - | edgevlm run --camera -``, or Motion JPEG."""

from __future__ import annotations

import os
import select
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Recording, StageTimer
from edgevlm.apps.sources.ffmpeg import Feed, load_av, open_feed
from edgevlm.apps.sources.opencv import decode_picture
from edgevlm.errors import SourceError
from edgevlm.runtime.preprocess import MOST_PIXELS

POLL_S = 0.2  # how long a read waits before it looks whether the source was closed
BLOCK = 1 << 16
Y4M, JPEG, END, SCAN = b"YUV4MPEG2", b"\xff\xd8\xff", b"\xff\xd9", b"\xff\xda"
LOOK = 4096  # bytes in which the first picture of Motion JPEG begins
FALLBACK_FPS = 25.0  # of a stream that carries no times, as ffmpeg takes it


class Pipe:
    """Reads a descriptor, which it does not own; :meth:`close` ends every read within POLL_S, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ahead = b""
        self.closed, self.taken = False, 0

    def format(self) -> str:
        """FFmpeg's name for what the pipe begins with. Raises SourceError for an empty stream and for one of another kind."""
        while len(self._ahead) < LOOK and JPEG not in self._ahead and not self._ahead.startswith(Y4M):
            if not (block := self._read(BLOCK)):
                break
            self._ahead += block
        if not self._ahead:
            raise SourceError(
                "stdin: is empty; pipe video into it, like: ffmpeg -i SOURCE -f yuv4mpegpipe - | edgevlm run --camera -"
            )
        if self._ahead.startswith(Y4M):
            return "yuv4mpegpipe"
        if JPEG in self._ahead[: LOOK + len(JPEG)]:
            self._ahead = self._ahead[self._ahead.index(JPEG) :]
            return "mjpeg"
        raise SourceError("stdin: neither YUV4MPEG2 nor Motion JPEG; write it with ffmpeg -f yuv4mpegpipe or -f mjpeg")

    def take(self, count: int) -> bytes:
        """Return up to ``count`` bytes; none at the end."""
        taken = self._ahead[:count] or self._read(count)
        self._ahead = self._ahead[count:]
        self.taken += len(taken)
        return taken

    def close(self) -> None:
        self.closed = True

    def _read(self, count: int) -> bytes:
        while not self.closed:
            if select.select([self._descriptor], [], [], POLL_S)[0]:
                return os.read(self._descriptor, count)
        return b""


class StdinSource(Recording):
    """Waits for its reader, and the pipe makes whoever writes it wait; times are frame numbers over the stream's rate.

    ``rate``: of Motion JPEG, frames a second. Frames that are not sampled are read and not decoded.
    """

    def __init__(self, fps: float | None, rate: float | None = None, descriptor: int | None = None) -> None:
        super().__init__("stdin", fps)
        self._pipe = Pipe(_stdin() if descriptor is None else descriptor)
        self._jpeg, self._av = (kind := self._pipe.format()) == "mjpeg", load_av()
        self._feed = Feed(self._pipe.take, 4 * MOST_PIXELS)
        self._packet: Any = None
        try:
            self._container = open_feed(self._feed, kind)
        except (self._av.error.FFmpegError, ValueError, OSError):
            raise SourceError(
                f"stdin: this {kind} is damaged, or of a kind that is not read; write it with ffmpeg -pix_fmt yuv420p"
            ) from None
        stream = self._container.streams.video[0]
        if not self._jpeg and stream.width * stream.height > MOST_PIXELS:
            raise SourceError(f"stdin: pictures of {stream.width}x{stream.height} are not read")
        self._rate = (rate or FALLBACK_FPS) if self._jpeg else float(stream.average_rate or FALLBACK_FPS)
        self._packets = self._container.demux(video=0)
        self._count = 0

    def _advance(self) -> float | None:
        self._feed.renew()
        try:
            packet = next(self._packets, None)
        except (self._av.error.FFmpegError, ValueError):
            raise SourceError("stdin: a frame does not begin where it should; the stream is damaged") from None
        if packet is None or not packet.size or self._pipe.closed:
            return None
        self._packet = packet
        self._count += 1
        return (self._count - 1) / self._rate

    def _picture(self, timer: StageTimer) -> NDArray[np.uint8] | None:
        packet = self._packet
        image = decode_picture(bytes(packet)) if self._jpeg else packet.decode()[0].to_ndarray(format="rgb24")
        timer.mark("decode")
        return image

    def _check_end(self) -> None:
        data = bytes(self._packet or b"")
        if self._jpeg:
            is_cut = bool(data) and not 0 <= data.rfind(SCAN) < data.rfind(END)
        else:
            is_cut = self._packet is not None and self._packet.pos + len(data) < self._pipe.taken
        if is_cut:
            raise SourceError("stdin: ended in the middle of a frame; the stream was cut short")
        if not self.given:
            raise SourceError("stdin: ended before there was a frame that can be read")

    def skip(self, time_s: float) -> bool:
        return False  # whoever writes to the pipe decides where it begins

    def interrupt(self) -> None:
        self._pipe.close()

    def close(self) -> None:
        super().close()
        self._pipe.close()


def _stdin() -> int:
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise SourceError("stdin: is closed; pipe video into it") from None
    if os.isatty(descriptor):
        raise SourceError("stdin: is a terminal; pipe video into it, like: edgevlm run --camera - < clip.y4m")
    return descriptor

"""Video from a pipe: ``ffmpeg ... -f yuv4mpegpipe - | edgevlm run --camera -``, or Motion JPEG."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from edgevlm.apps.sources.base import Frame, Sampler, Source, StageTimer, State
from edgevlm.apps.sources.bytestream import ByteStream
from edgevlm.apps.sources.mjpeg import START, MjpegDecoder
from edgevlm.apps.sources.y4m import MAGIC, Y4mDecoder
from edgevlm.errors import SourceError

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
        self._sampler = Sampler(fps)
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

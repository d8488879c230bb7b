"""Sources that come to an end: video files, folders of pictures, and video from a pipe. They wait for their reader."""

from __future__ import annotations

import os
import re
import select
import sys
from abc import abstractmethod
from pathlib import Path
from typing import Any

from edgevlm.apps.sources.base import Frame, FrameSampler, Image, Source, StageTimer, State
from edgevlm.apps.sources.opencv import Capture, decode_picture, load_cv2
from edgevlm.errors import SourceError
from edgevlm.runtime.files import is_utf8, look
from edgevlm.runtime.preprocess import MOST_PIXELS

LEAST_S = 1e-3  # between two mended times
JUMP_S = 60.0  # between two pictures of a recording: more is not believed, either way
FALLBACK_FPS = 25.0  # of what declares no rate, as ffmpeg takes it
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
Y4M, JPEG, END, SCAN = b"YUV4MPEG2", b"\xff\xd8\xff", b"\xff\xd9", b"\xff\xda"
LOOK = 4096  # bytes in which the first picture of Motion JPEG begins
POLL_S = 0.2  # how long a read waits before it looks whether the source was closed


class Recording(Source):
    """A source that waits for its reader and ends; a subclass finds the next picture and decodes those that are due."""

    given = 0  # frames read so far

    def __init__(self, name: str, fps: float | None) -> None:
        self.name, self._sampler = name, FrameSampler(fps)

    @abstractmethod
    def _advance(self) -> float | None:
        """Go to the next picture and return its time, seconds; None at the end. Raises SourceError for a damaged source."""

    @abstractmethod
    def _picture(self) -> Image | None:
        """Decode the picture, uint8 RGB ``[H, W, 3]``; None where it is damaged."""

    def read(self) -> Frame | None:
        timer = StageTimer()
        try:
            while self.state not in (State.ENDED, State.FAILED) and (time_s := self._advance()) is not None:
                self.state = State.RUNNING
                if not self._sampler.wants(time_s):
                    continue
                timer.captured()
                image = self._picture()
                timer.mark("decode")
                if image is not None:
                    self.given += 1
                    return Frame(image, time_s, timer=timer)
                self.drops["corrupt"] += 1
            if self.state not in (State.ENDED, State.FAILED):
                self.close()
                if not self.given:
                    raise SourceError(f"{self.name}: ended before there was a picture that can be read; it is damaged")
        except SourceError:
            self.state = State.FAILED
            raise
        return None


class VideoSource(Recording):
    """Reads a file to its end, as fast as it is asked. Times are the container's, mended (:class:`RecordedClock`)."""

    def __init__(self, path: str | Path, fps: float | None) -> None:
        self.path = Path(path)
        super().__init__(self.path.name, fps)
        check_readable(self.path)
        cv2 = load_cv2()
        with_ffmpeg = cv2.videoio_registry.hasBackend(cv2.CAP_FFMPEG)  # others would take what it refuses: lists of other files
        with self.path.open("rb") as file:  # which OpenCV opens again, by a name in UTF-8
            name = str(self.path) if is_utf8(self.path) else f"/proc/self/fd/{file.fileno()}"
            self._capture = Capture(name, cv2.CAP_FFMPEG if with_ffmpeg else cv2.CAP_ANY)
        if not self._capture.is_open:
            raise SourceError(f"{path}: not a video that can be read (damaged, cut short, or another kind of file)")
        rate = self._capture.property("FPS")
        self._period = 1 / rate if 0 < rate < 1000 else 1 / FALLBACK_FPS
        self._clock = RecordedClock(self._period)

    def _advance(self) -> float | None:
        grabbed = self._capture.grab()
        return None if grabbed is None else self._clock(grabbed.stamp_s)

    def _picture(self) -> Image | None:
        return self._capture.retrieve()

    @property
    def end_s(self) -> float:
        """Where the pictures decoded so far end, seconds; after the last :meth:`read`, the recording's length."""
        return 0.0 if self._clock.time_s is None else self._clock.time_s + self._period

    def close(self) -> None:
        super().close()
        self._capture.close()


class RecordedClock:
    """Makes the stamps of a recording strictly increasing; there is no arrival to hold them against.

    With stamps ``s``, an origin ``o`` (0 at first) and the declared time of one picture ``p``::

        m[n] = max(s[n] + o, m[n-1] + LEAST_S)    a repeat, or pictures in the wrong order: the later stamps are right again
        o    = m[n-1] + p - s[n]                  first, where |s[n] + o - m[n-1]| > JUMP_S: the clock was set

    A picture without a stamp is ``p`` after the one before.
    """

    def __init__(self, period_s: float) -> None:
        self._period = period_s
        self._origin = 0.0
        self.time_s: float | None = None  # of the newest picture

    def __call__(self, stamp_s: float | None) -> float:
        """Return the mended time of the next picture, seconds."""
        before = self.time_s
        if before is None:
            self.time_s = max(0.0, stamp_s or 0.0)
            self._origin = self.time_s - (stamp_s or 0.0)
        elif stamp_s is None or abs(stamp_s + self._origin - before) > JUMP_S:
            self.time_s = before + self._period
            if stamp_s is not None:
                self._origin = self.time_s - stamp_s
        else:
            self.time_s = max(stamp_s + self._origin, before + LEAST_S)
        return self.time_s


class FolderSource(Recording):
    """Pictures in natural order: img2 comes before img10. A damaged one takes its time and is counted.

    ``rate``: pictures a second, ``fps`` unless given, so that each is taken.
    """

    def __init__(self, folder: str | Path, fps: float | None, rate: float | None = None) -> None:
        super().__init__(Path(folder).name, fps)
        self._rate, self._next = rate or fps or 1.0, 0
        try:
            found = [path for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
        except OSError as error:
            raise SourceError(f"{folder}: cannot be read ({error.strerror})") from None
        if not found:
            raise SourceError(f"{folder}: is a folder without pictures ({', '.join(sorted(SUFFIXES))})")
        self._paths = sorted(found, key=lambda path: natural(path.name))

    @property
    def end_s(self) -> float:
        """Where the pictures taken or passed over so far end, seconds."""
        return self._next / self._rate

    def _advance(self) -> float | None:
        if self._next == len(self._paths):
            return None
        self._next += 1
        return (self._next - 1) / self._rate

    def _picture(self) -> Image | None:
        try:
            return decode_picture(self._paths[self._next - 1].read_bytes())
        except OSError:
            return None


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key: digits compare as the number they are, other characters without regard to case."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts]


class StdinSource(Recording):
    """YUV4MPEG2 or Motion JPEG from a pipe; whoever writes it waits. Times are frame numbers over the stream's rate.

    ``rate``: of Motion JPEG, frames a second. Frames that are not sampled are read and not decoded.
    """

    def __init__(self, fps: float | None, rate: float | None = None, descriptor: int | None = None) -> None:
        from edgevlm.apps.sources.network import Feed, load_av, open_feed

        super().__init__("stdin", fps)
        self._descriptor, self._closed, self._av = _stdin() if descriptor is None else descriptor, False, load_av()
        self._ahead = head = b""
        while len(head) < LOOK and JPEG not in head and not head.startswith(Y4M) and (block := self._take(1 << 16)):
            head += block
        self._jpeg = not head.startswith(Y4M)
        if self._jpeg and JPEG not in head[: LOOK + len(JPEG)]:
            found = "neither YUV4MPEG2 nor Motion JPEG" if head else "is empty"
            raise SourceError(f"stdin: {found}; write it: ffmpeg -i SOURCE -f yuv4mpegpipe - | edgevlm run --camera -")
        self._ahead = head[head.index(JPEG if self._jpeg else Y4M) :]
        self._feed, kind = Feed(self._take, 4 * MOST_PIXELS), "mjpeg" if self._jpeg else "yuv4mpegpipe"
        self._packet: Any = None
        try:
            self._container = open_feed(self._feed, kind)
        except (self._av.error.FFmpegError, ValueError, OSError):
            raise SourceError(f"stdin: this {kind} is damaged, or of a kind that is not read (try -pix_fmt yuv420p)") from None
        stream = self._container.streams.video[0]
        if not self._jpeg and stream.width * stream.height > MOST_PIXELS:
            raise SourceError(f"stdin: pictures of {stream.width}x{stream.height} are not read")
        self._rate = (rate or FALLBACK_FPS) if self._jpeg else float(stream.average_rate or FALLBACK_FPS)
        self._packets, self._count = self._container.demux(video=0), 0

    def _take(self, count: int) -> bytes:
        """Return up to ``count`` bytes; none at the end, or soon after the source was closed."""
        if taken := self._ahead[:count]:
            self._ahead = self._ahead[count:]
            return taken
        while not self._closed:
            if select.select([self._descriptor], [], [], POLL_S)[0]:
                return os.read(self._descriptor, count)
        return b""

    def _advance(self) -> float | None:
        self._feed.renew()
        try:
            packet = next(self._packets, None)
        except (self._av.error.FFmpegError, ValueError):
            raise SourceError("stdin: a frame does not begin where it should; the stream is damaged") from None
        if packet is None or not packet.size or self._closed:
            return None
        self._packet = packet
        self._count += 1
        return (self._count - 1) / self._rate

    def _picture(self) -> Image | None:
        """Decode the packet; None where it is damaged or was cut short."""
        if self._jpeg:
            data = bytes(self._packet)
            return decode_picture(data) if 0 <= data.rfind(SCAN) < data.rfind(END) else None
        try:
            image: Image = self._packet.decode()[0].to_ndarray(format="rgb24")
        except (self._av.error.FFmpegError, IndexError):
            return None
        return image

    def skip(self, time_s: float) -> bool:
        return False  # whoever writes to the pipe decides where it begins

    def interrupt(self) -> None:
        self._closed = True

    def close(self) -> None:
        super().close()
        self._closed = True


def _stdin() -> int:
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise SourceError("stdin: is closed; pipe video into it") from None
    if os.isatty(descriptor):
        raise SourceError("stdin: is a terminal; pipe video into it, like: edgevlm run --camera - < clip.y4m")
    return descriptor


def check_readable(path: Path) -> None:
    """Raise SourceError, one line, unless ``path`` is a file that may be read."""
    if (found := look(path)) != "file":
        wrong = {"nothing": "there is no such file", "folder": "is a folder", "other": "is a device or a pipe"}[found]
        raise SourceError(f"{path}: {wrong}; give a video file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None

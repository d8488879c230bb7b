"""Read video files, folders of pictures, and video from a pipe."""

from __future__ import annotations

import os
import re
import select
import sys
from abc import abstractmethod
from pathlib import Path
from typing import Any

from edgevlm.apps.sources.base import Frame, FrameSampler, Image, Source, StageTimer, State
from edgevlm.apps.sources.picture import JPEG, split_pictures, try_decoding
from edgevlm.apps.sources.video import FALLBACK_FPS, Feed, RecordedClock, Video, load_av, open_video
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look
from edgevlm.runtime.preprocess import MOST_PIXELS

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
Y4M = b"YUV4MPEG2"
LOOK = 4096  # search this many bytes for the start of the first Motion JPEG picture
POLL_S = 0.2


class Recording(Source):
    """A source that ends, and that waits for its reader."""

    given = 0  # frames read so far

    def __init__(self, name: str, fps: float | None) -> None:
        self.name, self._sampler = name, FrameSampler(fps)

    @abstractmethod
    def _advance(self) -> float | None:
        """Advance one picture and return its time in seconds, or None at the end. Raises SourceError if the file is damaged."""

    @abstractmethod
    def _picture(self) -> Image | None:
        """Decode the current picture to uint8 RGB ``[H, W, 3]``. Return None if the picture is damaged."""

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
                    raise SourceError(f"{self.name}: no readable picture found; the file or stream is damaged")
        except SourceError:
            self.state = State.FAILED
            raise
        return None


class VideoSource(Recording):
    """Reads a video file to its end, as fast as frames are requested. :class:`RecordedClock` corrects the timestamps."""

    def __init__(self, path: str | Path, fps: float | None) -> None:
        self.path = Path(path)
        super().__init__(self.path.name, fps)
        check_readable(self.path)
        try:
            self._video = open_video(self.path)
        except SourceError as error:
            raise SourceError(f"{path}: {error}") from None
        self._frames, self._clock = self._video.frames(), RecordedClock(self._video.period_s)
        self._frame: Any = None

    def _advance(self) -> float | None:
        for frame in self._frames:
            if frame is not None:
                self._frame = frame
                return self._clock(frame.time)
            self.drops["corrupt"] += 1
        return None

    def _picture(self) -> Image | None:
        return None if self._video.is_corrupt(self._frame) else self._video.rgb(self._frame)

    @property
    def end_s(self) -> float:
        """Return the time at which the newest decoded picture ends, in seconds.

        After the last :meth:`read`, this is the recording's length.
        """
        return 0.0 if self._clock.time_s is None else self._clock.time_s + self._video.period_s

    def close(self) -> None:
        super().close()
        self._video.close()


class FolderSource(Recording):
    """Reads a folder's pictures in natural order: img2 comes before img10. A damaged picture is dropped and counted.

    ``rate``: the number of pictures a second, by default ``fps``, so that every picture is watched.
    """

    def __init__(self, folder: str | Path, fps: float | None, rate: float | None = None) -> None:
        super().__init__(Path(folder).name, fps)
        self._rate, self._next = rate or fps or 1.0, 0
        try:
            found = [path for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
        except OSError as error:
            raise SourceError(f"{folder}: cannot be read ({error.strerror})") from None
        if not found:
            raise SourceError(f"{folder}: contains no pictures ({', '.join(sorted(SUFFIXES))})")
        self._paths = sorted(found, key=lambda path: natural(path.name))

    @property
    def end_s(self) -> float:
        """Return the time at which the newest picture ends, in seconds."""
        return self._next / self._rate

    def _advance(self) -> float | None:
        if self._next == len(self._paths):
            return None
        self._next += 1
        return (self._next - 1) / self._rate

    def _picture(self) -> Image | None:
        try:
            return try_decoding(self._paths[self._next - 1].read_bytes())
        except OSError:
            return None


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers by value and ignores case."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts]


class StdinSource(Recording):
    """Reads YUV4MPEG2 or Motion JPEG from a pipe.

    ``rate``: the assumed number of frames a second in Motion JPEG. A frame's time is the frame's number divided by the stream's
    rate. Frames that are not sampled are read but not decoded.
    """

    def __init__(self, fps: float | None, rate: float | None = None, descriptor: int | None = None) -> None:
        super().__init__("stdin", fps)
        self._descriptor, self._closed, self._count = _stdin() if descriptor is None else descriptor, False, 0
        self._ahead = head = b""
        while len(head) < LOOK and JPEG not in head and not head.startswith(Y4M) and (block := self._take(1 << 16)):
            head += block
        if not head.startswith(Y4M) and JPEG not in head[: LOOK + len(JPEG)]:
            found = "neither YUV4MPEG2 nor Motion JPEG" if head else "is empty"
            raise SourceError(f"stdin: {found}; pipe video in: ffmpeg -i SOURCE -f yuv4mpegpipe - | edgevlm run --camera -")
        self._ahead, self._feed = head, Feed(self._take, 4 * MOST_PIXELS)
        self._video: Video | None = None
        if head.startswith(Y4M):
            options = {"protocol_whitelist": "none", "probesize": "32", "analyzeduration": "0"}
            try:
                self._video = Video(self._feed, format="yuv4mpegpipe", options=options, buffer_size=4096)
            except SourceError as error:
                raise SourceError(f"stdin: {error}") from None
            except (load_av().error.FFmpegError, ValueError, OSError):
                raise SourceError(
                    "stdin: YUV4MPEG2 is damaged or its pixel format is not supported; try ffmpeg's -pix_fmt yuv420p"
                ) from None
            self._rate, self._items = 1 / self._video.period_s, self._video.container.demux(self._video.stream)
        else:
            self._rate, self._items = rate or FALLBACK_FPS, split_pictures(self._feed.read)
        self._item: Any = None

    def _take(self, count: int) -> bytes:
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
            self._item = next(self._items, None)
        except (load_av().error.FFmpegError, ValueError):
            raise SourceError("stdin: invalid start of a frame; the stream is damaged") from None
        if self._item is None or self._closed or (self._video is not None and not self._item.size):
            return None
        self._count += 1
        return (self._count - 1) / self._rate

    def _picture(self) -> Image | None:
        if self._video is None:
            return try_decoding(self._item)
        frames = self._video.decode(self._item)
        return self._video.rgb(frames[0]) if frames and frames[0] is not None else None

    def skip(self, time_s: float) -> bool:
        return False

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
        raise SourceError("stdin: is a terminal; pipe video into it, for example: edgevlm run --camera - < clip.y4m")
    return descriptor


def check_readable(path: Path) -> None:
    """Raise SourceError with a one-line message unless ``path`` is a readable file."""
    if (found := look(path)) != "file":
        wrong = {"nothing": "file not found", "folder": "is a folder", "other": "is a device or a pipe"}[found]
        raise SourceError(f"{path}: {wrong}; give a video file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None

"""Video files, decoded frame by frame; frames that are not sampled are never converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import LEAST_S, Recording, StageTimer
from edgevlm.apps.sources.opencv import Capture, load_cv2
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look

COMPLETE = 0.9  # of the frames, or of the time, a container declares: below this the file was cut short
FALLBACK_FPS = 25.0  # for a container that declares no rate
JUMP_S = 60.0  # between two pictures of a recording: more is not believed, either way


class VideoSource(Recording):
    """Reads a file to its end, as fast as it is asked. Times are the container's, mended (:class:`RecordedClock`)."""

    def __init__(self, path: str | Path, fps: float | None) -> None:
        self.path = Path(path)
        super().__init__(self.path.name, fps)
        check_readable(self.path)
        cv2 = load_cv2()
        with_ffmpeg = cv2.videoio_registry.hasBackend(cv2.CAP_FFMPEG)  # others would take what it refuses: lists of other files
        self._capture = Capture(str(self.path), cv2.CAP_FFMPEG if with_ffmpeg else cv2.CAP_ANY)
        if not self._capture.is_open:
            raise SourceError(f"{path}: not a video that can be read (damaged, cut short, or another kind of file)")
        self._declared = int(self._capture.property("FRAME_COUNT"))
        rate = self._capture.property("FPS")
        self._period = 1 / rate if 0 < rate < 1000 else 1 / FALLBACK_FPS
        self._clock = RecordedClock(self._period)
        self._decoded = 0

    def _advance(self) -> float | None:
        if (grabbed := self._capture.grab()) is None:
            return None
        self._decoded += 1
        return self._clock(0.0 if grabbed.stamp_s is None and self._decoded == 1 else grabbed.stamp_s)

    def _picture(self, timer: StageTimer) -> NDArray[np.uint8] | None:
        image = self._capture.retrieve()
        timer.mark("decode")
        return image

    def _check_end(self) -> None:
        """By the count of pictures or by their times: a container may count pictures that only repeat the one before."""
        if self._decoded == 0:
            raise SourceError(f"{self.path}: no frame could be decoded; the file is damaged")
        reached = max((self._clock.time_s or 0.0) / self._period + 1, self._decoded)
        if reached < COMPLETE * self._declared:
            raise SourceError(
                f"{self.path}: ended after {self._decoded} of {self._declared} frames; the file is damaged or cut short"
            )

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
            return self.time_s
        if stamp_s is None or abs(stamp_s + self._origin - before) > JUMP_S:
            self.time_s = before + self._period
            if stamp_s is not None:
                self._origin = self.time_s - stamp_s
        else:
            self.time_s = max(stamp_s + self._origin, before + LEAST_S)
        return self.time_s


def check_readable(path: Path) -> None:
    """Raise SourceError, one line, unless ``path`` is a file that may be read."""
    found = look(path)
    if found == "nothing":
        raise SourceError(f"{path}: there is no such file")
    if found == "folder":
        raise SourceError(f"{path}: is a folder; give a video file")
    if found == "other":
        raise SourceError(f"{path}: is a device or a pipe; give a video file, or a camera with --camera")
    try:
        path.open("rb").close()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None

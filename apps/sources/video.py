"""Video files, decoded frame by frame; frames that are not sampled are never converted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edgevlm.apps.sources.base import LEAST_S, Decode, Frame, FrameSampler, Source, StageTimer, State
from edgevlm.apps.sources.devices import ROOT
from edgevlm.apps.sources.gstreamer import has_element, opencv_problem, pygobject_problem
from edgevlm.apps.sources.opencv import load_cv2
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look

COMPLETE = 0.9  # of the frames, or of the time, a container declares: below this the file was cut short
FALLBACK_FPS = 25.0  # for a container that declares no rate
JUMP_S = 60.0  # between two pictures of a recording: more is not believed, either way
JETSON_DECODERS = ("nvhost-nvdec", "v4l2-nvdec", "nvhost-nvdec-ctl")  # nodes under /dev
JETSON_ELEMENT = "nvv4l2decoder"


class VideoSource(Source):
    """Reads a file to its end, as fast as it is asked. Times are the container's, mended (:class:`RecordedClock`)."""

    def __init__(self, path: str | Path, fps: float | None, decode: Decode = "auto") -> None:
        self.path = Path(path)
        self.name = self.path.name
        check_readable(self.path)
        self._cv2 = load_cv2()
        self._capture, self.mode = open_file(str(self.path), decode)
        if not self._capture.isOpened():
            raise SourceError(f"{path}: not a video that can be read (damaged, cut short, or another kind of file)")
        self._declared = int(self._capture.get(self._cv2.CAP_PROP_FRAME_COUNT))
        rate = self._capture.get(self._cv2.CAP_PROP_FPS)
        self._period = 1 / rate if 0 < rate < 1000 else 1 / FALLBACK_FPS
        self._sampler = FrameSampler(fps)
        self._clock = RecordedClock(self._period)
        self._decoded = 0

    def read(self) -> Frame | None:
        if self.state in (State.ENDED, State.FAILED):
            return None
        self.state = State.RUNNING
        timer = StageTimer()
        while self._capture.grab():
            time_s = self._advance()
            if not self._sampler.wants(time_s):
                continue
            timer.captured()
            decoded, image = self._capture.retrieve()
            timer.mark("decode")
            if decoded:
                image = self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)
                timer.mark("convert")
                return Frame(image, time_s, timer=timer)
            self.drops["corrupt"] += 1
        self._end()
        return None

    def _advance(self) -> float:
        """Count the picture; its time. OpenCV says 0 where the container has none."""
        stamp = self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1e3
        self._decoded += 1
        return self._clock(stamp if stamp != 0 or self._decoded == 1 else None)

    def _end(self) -> None:
        self.close()
        if self._decoded == 0:
            self.state = State.FAILED
            raise SourceError(f"{self.path}: no frame could be decoded; the file is damaged")
        if not self._complete():
            self.state = State.FAILED
            raise SourceError(
                f"{self.path}: ended after {self._decoded} of {self._declared} frames; the file is damaged or cut short"
            )

    @property
    def end_s(self) -> float:
        """Where the pictures decoded so far end, seconds; after the last :meth:`read`, the recording's length."""
        return 0.0 if self._clock.time_s is None else self._clock.time_s + self._period

    def _complete(self) -> bool:
        """By the count of pictures or by their times: a container may count pictures that only repeat the one before."""
        reached = ((self._clock.time_s or 0.0) / self._period + 1, self._decoded)
        return max(reached) >= COMPLETE * self._declared

    def close(self) -> None:
        super().close()
        self._capture.release()


class RecordedClock:
    """Makes the stamps of a recording strictly increasing; there is no arrival to hold them against.

    With stamps ``s``, an origin ``o`` (0 at first) and the declared time of one picture ``p``::

        m[n] = max(s[n] + o, m[n-1] + LEAST_S)    a repeat, or pictures in the wrong order: the later stamps are right again
        o    = m[n-1] + p - s[n]                  first, where |s[n] + o - m[n-1]| > JUMP_S: the clock was set, and goes on

    A picture without a stamp is ``p`` after the one before.
    """

    def __init__(self, period_s: float) -> None:
        self._period = period_s
        self._origin = 0.0
        self.time_s: float | None = None  # of the newest picture

    def __call__(self, stamp_s: float | None) -> float:
        """The mended time of the next picture, seconds."""
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


def open_file(path: str, decode: Decode, root: Path = ROOT) -> tuple[Any, str]:
    """An OpenCV capture of a file, which may not have opened, and who decodes it; nothing where only the CPU could."""
    cv2 = load_cv2()
    with_ffmpeg = cv2.videoio_registry.hasBackend(cv2.CAP_FFMPEG)  # others would take what it refuses: lists of other files
    by_cpu = cv2.CAP_FFMPEG if with_ffmpeg else cv2.CAP_ANY
    if decode == "cpu" or vaapi_problem(root) is not None:
        return cv2.VideoCapture(path, by_cpu), ""
    asked = [cv2.CAP_PROP_HW_ACCELERATION, cv2.VIDEO_ACCELERATION_ANY]
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, asked)
    if not capture.isOpened():
        return cv2.VideoCapture(path, by_cpu), ""
    if int(capture.get(cv2.CAP_PROP_HW_ACCELERATION)) == cv2.VIDEO_ACCELERATION_NONE:
        return capture, "decoded by the CPU: OpenCV's FFmpeg finds no decoder for it on the graphics card"
    return capture, "decoded by the graphics card"


def vaapi_problem(root: Path = ROOT) -> str | None:
    """Why no graphics card decodes for OpenCV's FFmpeg; None where one may."""
    nodes = sorted((root / "dev" / "dri").glob("renderD*"))
    if not nodes:
        return "there is no /dev/dri/renderD*"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return f"{nodes[0]} may not be opened: sudo usermod -aG render $USER, and log in again"
    cv2 = load_cv2()
    return (
        None if hasattr(cv2, "CAP_PROP_HW_ACCELERATION") else "this OpenCV knows no hardware decoding; it takes 4.5.2 or newer"
    )


def jetson_problem(root: Path = ROOT) -> str | None:
    """Why no Jetson decodes through GStreamer; None where one does."""
    if not any((root / "dev" / name).exists() for name in JETSON_DECODERS):
        return "this is no Jetson"
    if opencv_problem() is None or has_element(JETSON_ELEMENT):
        return None
    if pygobject_problem() is None:
        return f"GStreamer has no {JETSON_ELEMENT}: sudo apt install nvidia-l4t-gstreamer"
    return f"{opencv_problem()}, and {pygobject_problem()}"

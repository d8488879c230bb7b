"""Define the base classes of sources and of connections to cameras."""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import SourceError
from edgevlm.runtime.preprocess import Pixels

if TYPE_CHECKING:
    from edgevlm.apps.hosts import AllowedHosts
    from edgevlm.calib.demo.questions import DemoScene

Image = NDArray[np.uint8]
Rule = Literal["block", "drop-oldest"]
SLOWEST_FPS = 1e-5  # frames per second: about one frame a day


class StageTimer:
    """Measures how long each step of processing a frame takes.

    ``captured_s``: when the frame was captured, in monotonic seconds.
    """

    __slots__ = ("_last", "captured_s", "ms")

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.captured_s = self._last = time.monotonic()

    def captured(self) -> None:
        """End the stage ``capture``, and count the frame's latency from now on."""
        self.mark("capture")
        self.captured_s = self._last

    def resume(self) -> None:
        """Continue timing after a pause, which is not counted."""
        now = time.monotonic()
        self.captured_s += now - self._last
        self._last = now

    def mark(self, stage: str) -> None:
        """End the current stage, and record its duration under a name."""
        now = time.monotonic()
        self.ms[stage] = 1e3 * (now - self._last)
        self._last = now


@dataclass(frozen=True, slots=True)
class Frame:
    """A sampled frame: uint8 RGB ``[H, W, 3]`` and its stream time in seconds, which never decreases.

    ``scene``: the correct answers to the demo model's questions, only in the demo. ``pixels``: the image after
    :attr:`Source.prepare`.
    """

    def __repr__(self) -> str:
        return f"Frame({' x '.join(map(str, np.shape(self.image)))}, {self.time_s} s)"

    image: Image
    time_s: float
    scene: DemoScene | None = None
    pixels: Pixels | None = None
    timer: StageTimer | None = None


class State(str, Enum):
    """The state of a source; docs/guide/cameras.md shows the possible transitions."""

    INITIALISING = "initialising"
    RUNNING = "running"
    STALLED = "stalled"  # connected, but without a frame for ``stall_timeout_s``
    RECONNECTING = "reconnecting"
    ENDED = "ended"  # a recording was read to its end, or the source was closed
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options for a source. Sources ignore options that do not apply to them. Raises SourceError for invalid values.

    ``fps`` is the number of frames to take per second, according to their timestamps.
    ``size`` (width, height), ``pixel_format`` (a FourCC like ``MJPG``) and ``camera_fps`` are requested from a camera.
    ``camera_fps`` is also the assumed frame rate of recordings without timestamps.
    ``realtime`` plays a recording at ``speed`` times its own pace.
    ``rule`` applies while the reader is busy: ``drop-oldest`` (the default for live sources) or ``block``.
    ``wait`` keeps trying to connect instead of failing when the first attempt fails.
    ``backoff_s`` is the first and the longest pause between attempts to connect.
    ``seed`` is the random seed of the demo world and of the pauses between attempts.
    ``open_timeout_s`` limits an attempt to connect.
    A source is STALLED after ``stall_timeout_s`` seconds without a frame, and reconnects after ``read_timeout_s`` seconds.
    ``hosts`` limits the hosts that addresses, redirects and playlists may reach; None allows any host.
    """

    fps: float = 2.0
    realtime: bool = False
    speed: float = 1.0
    rule: Rule | None = None
    size: tuple[int, int] | None = None
    pixel_format: str | None = None
    camera_fps: float | None = None
    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    stall_timeout_s: float = 3.0
    backoff_s: tuple[float, float] = (0.5, 30.0)
    wait: bool = False
    seed: int = 0
    hosts: AllowedHosts | None = None

    def __post_init__(self) -> None:
        if not SLOWEST_FPS <= self.fps < math.inf:
            raise SourceError(f"--fps {self.fps:g}: must be at least {SLOWEST_FPS:g} frames a second")
        if self.camera_fps is not None and not SLOWEST_FPS <= self.camera_fps <= 1000:
            raise SourceError(f"--camera-fps {self.camera_fps:g}: must be {SLOWEST_FPS:g} to 1000 frames a second")
        if self.pixel_format is not None and not re.fullmatch(r"[!-~]{3,4}", self.pixel_format):
            raise SourceError(f"--pixel-format {self.pixel_format}: must be a FourCC such as MJPG or YUYV")
        if self.rule not in (None, *get_args(Rule)):
            raise SourceError(f"--rule {self.rule}: must be {' or '.join(get_args(Rule))}")
        for name in ("open", "read", "stall"):
            seconds = getattr(self, f"{name}_timeout_s")
            if not 0 < seconds < math.inf:
                raise SourceError(f"--{name}-timeout {seconds:g}: must be above 0 seconds")


class Source(ABC):
    """A source of frames, sampled at a given rate by their own timestamps.

    A live source keeps capturing between reads, and may drop frames. Other sources wait to be read.
    """

    name: str
    live: bool = False
    rule: Rule = "block"  # what happens to frames while the reader is busy
    state: State = State.INITIALISING
    problem: str | None = None  # why the source is not RUNNING, in a few words without credentials, if known
    reconnects: int = 0
    attempts: int = 0
    prepare: Callable[[Image], Pixels] | None = None  # the capturing thread calls this on each image; set it before reading
    mode: str = ""

    @cached_property
    def drops(self) -> Counter[str]:
        """Return the number of lost frames, by cause."""
        return Counter()

    @property
    def dropped(self) -> int:
        """Return the sum of :attr:`drops`."""
        return self.drops.total()

    @abstractmethod
    def read(self) -> Frame | None:
        """Return the next sampled frame, or None at the end. Raises SourceError if the source cannot continue."""

    def interrupt(self) -> None:  # noqa: B027
        """End a :meth:`read` that is waiting for frames. Any thread may call this method."""

    def skip(self, time_s: float) -> bool:
        """Skip to a stream time before the first :meth:`read`. Return False if the source cannot skip."""
        while (frame := self.read()) is not None and frame.time_s < time_s:
            pass
        return True

    def close(self) -> None:
        """Release the source, and set its state to ENDED unless it has FAILED."""
        if self.state is not State.FAILED:
            self.state = State.ENDED

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.state.value})"

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self.read()) is not None:
            yield frame


class FrameSampler:
    """Chooses frames by their timestamps: the first frame, then at most ``fps`` a second, or all if ``fps`` is None."""

    def __init__(self, fps: float | None) -> None:
        self._step = 0.0 if fps is None else 1 / fps
        self._start: float | None = None
        self._next = 0

    def wants(self, time_s: float) -> bool:
        if self._start is None:
            self._start = time_s
        if not self._step:
            return True
        elapsed = (time_s - self._start) / self._step
        if elapsed < self._next - 1e-6:
            return False
        self._next = int(elapsed + 1e-6) + 1
        return True


@dataclass(frozen=True, slots=True)
class Grabbed:
    """A picture before its conversion to RGB. ``stamp_s``: the source's timestamp in seconds.

    ``intra``: whether the picture can be decoded without earlier pictures. ``decoded``: False if data arrived but no new
    picture, for example before the first keyframe.
    """

    stamp_s: float | None = None
    intra: bool = True
    corrupt: bool = False
    decoded: bool = True


class Connection(ABC):
    """An open connection to a camera, read by one thread. A broken connection is never repaired; a new connection is opened.

    Opening a connection raises SourceError, or SourceRefused if a retry would not help.
    """

    finished: bool = False
    problem: str | None = None  # why the link broke, in a few words, if known
    mode: str = ""
    repeats: bool = False  # whether the link repeats the last picture when its camera is gone

    @abstractmethod
    def grab(self) -> Grabbed | None:
        """Wait for the next picture without converting it. Return None if the connection is broken."""

    @abstractmethod
    def retrieve(self) -> Image | None:
        """Return the last grabbed picture, uint8 RGB ``[H, W, 3]``, or None if the picture cannot be decoded."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Only the reading thread calls this method."""

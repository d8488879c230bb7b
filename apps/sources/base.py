"""A source of frames, and what every kind has in common."""

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
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import SourceError
from edgevlm.runtime.preprocess import Pixels

if TYPE_CHECKING:
    from edgevlm.apps.sources.hosts import AllowedHosts


class StageTimer:
    """Times the stages of one frame. ``ms``: milliseconds by stage; ``captured_s``: when it was captured, monotonic clock."""

    __slots__ = ("_last", "captured_s", "ms")

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.captured_s = self._last = time.monotonic()

    def captured(self) -> None:
        """The picture is there: what comes after is its latency."""
        self.mark("capture")
        self.captured_s = self._last

    def resume(self) -> None:
        """A pause is over, which was no part of the way."""
        now = time.monotonic()
        self.captured_s += now - self._last
        self._last = now

    def mark(self, stage: str) -> None:
        """A stage is over; what follows counts for the next."""
        now = time.monotonic()
        self.ms[stage] = 1e3 * (now - self._last)
        self._last = now


Rule = Literal["block", "drop-oldest"]
KEYFRAME_WAIT_S = 10.0  # a stream may have no picture that stands alone (intra refresh): then any that is decoded will do
LEAST_S = 1e-3  # between two mended times
SLOWEST_FPS = 1e-5  # a frame a day
Decode = Literal["auto", "cpu"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was true of a made-up world: a question about what is gone, its answer, and since when it is gone."""

    name: str
    question: str
    truth: str
    left_s: float


class Scene(Protocol):
    """The truth about a made-up world at one frame."""

    def truth(self, question: str) -> str | None:
        """The right answer, or None where there is not exactly one."""

    def sample(self, random: np.random.Generator) -> list[str]:
        """Questions that have an answer at this frame: one about now and one about before, where there are any."""

    def departed(self) -> list[Fact]:
        """Where each object was that has left, the one that left last first."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One sampled frame: uint8 RGB ``[H, W, 3]`` and its time in the stream, seconds, which never runs backwards.

    ``scene`` knows what there is to know after this frame, where the source does (the demo world does). ``source_s`` is the
    time of a live source's own clock, seconds, mended (``live.StampMender``); None where it has none. ``pixels`` are the image
    prepared for the model, where a frame preparation did so; ``still``: the gate found that it need not be watched, and
    ``gated`` counts those up to here.
    """

    image: NDArray[np.uint8]
    time_s: float
    scene: Scene | None = None
    source_s: float | None = None
    pixels: Pixels | None = None
    still: bool = False
    gated: int = 0
    timer: StageTimer | None = None


class State(str, Enum):
    """What a source is doing; docs/guide/cameras.md draws which state follows which."""

    INITIALISING = "initialising"  # nothing has been read yet
    RUNNING = "running"  # frames come
    STALLED = "stalled"  # connected, but no frame for ``stall_timeout_s``
    RECONNECTING = "reconnecting"  # the connection broke: waiting to try again, or trying
    ENDED = "ended"  # the last frame of a recording has been read, or it was closed
    FAILED = "failed"  # it cannot go on


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a source is opened and read. A kind ignores what it has no use for. Raises SourceError if it is invalid.

    ``fps``: frames a second taken, by their times. ``size``: (width, height) in pixels, ``pixel_format``: a FourCC like
    ``MJPG``, ``camera_fps``: frames a second, all asked of a camera that has several modes; what carries no times is taken for
    ``camera_fps``. ``decode``: a file by the graphics card, where one can, or by the CPU. ``realtime``: play what is recorded
    at ``speed`` times its own pace. ``rule``: what happens to frames while the reader is busy; None for ``drop-oldest`` where
    the source does not wait, ``block`` where it does. ``wait``: wait for a camera that is not there yet. ``seed``: of the demo
    world, and of the jitter of ``backoff_s``, the first and the longest pause between two attempts to connect.

    ``open_timeout_s``: a connection that takes longer is given up. ``stall_timeout_s``: without a frame this long the source
    is STALLED; ``read_timeout_s``: this long, and it is abandoned and connected anew. ``hosts``: that an address may reach,
    also by redirects of HTTP; None for any.
    """

    fps: float = 2.0
    realtime: bool = False
    speed: float = 1.0
    rule: Rule | None = None
    size: tuple[int, int] | None = None
    pixel_format: str | None = None
    camera_fps: float | None = None
    decode: Decode = "auto"
    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    stall_timeout_s: float = 3.0
    backoff_s: tuple[float, float] = (0.5, 30.0)
    wait: bool = False
    seed: int = 0
    hosts: AllowedHosts | None = None

    def __post_init__(self) -> None:
        if not SLOWEST_FPS <= self.fps < math.inf:
            raise SourceError(f"--fps {self.fps:g}: give frames a second, {SLOWEST_FPS:g} or more")
        if self.camera_fps is not None and not SLOWEST_FPS <= self.camera_fps <= 1000:
            raise SourceError(f"--camera-fps {self.camera_fps:g}: give frames a second, from {SLOWEST_FPS:g} to 1000")
        if self.pixel_format is not None and not re.fullmatch(r"[!-~]{3,4}", self.pixel_format):
            raise SourceError(f"--pixel-format {self.pixel_format}: give a FourCC like MJPG or YUYV")
        if self.rule not in (None, *get_args(Rule)):
            raise SourceError(f"--rule {self.rule}: give one of {', '.join(get_args(Rule))}")
        for name in ("open", "read", "stall"):
            seconds = getattr(self, f"{name}_timeout_s")
            if not 0 < seconds < math.inf:
                raise SourceError(f"--{name}-timeout {seconds:g}: give seconds above 0")


Prepare = Callable[[Frame], Frame]  # run on each frame in the capturing thread, before anybody may read it


class Source(ABC):
    """Frames sampled at a rate by their own timestamps.

    A live source goes on whether it is read or not, and says by what rule it drops frames; any other waits for its reader.
    """

    name: str
    live: bool = False
    rule: Rule = "block"  # what happens to frames while the reader is busy
    state: State = State.INITIALISING
    problem: str | None = None  # why it is not RUNNING, in a few words without credentials, where that is known
    reconnects: int = 0  # times that frames came again after the connection broke
    attempts: int = 0  # connections that were tried so far, of a source that tries
    prepare: Prepare | None = None  # set it before the first read
    mode: str = ""  # what a camera with several modes was opened as, in a few words

    @cached_property
    def drops(self) -> Counter[str]:
        """Frames that were due and are lost, by cause; frames that ``fps`` does not ask for are not among them."""
        return Counter()

    @property
    def dropped(self) -> int:
        """All of :attr:`drops`."""
        return self.drops.total()

    @abstractmethod
    def read(self) -> Frame | None:
        """The next sampled frame; None at the end. Raises SourceError when the source cannot go on."""

    def interrupt(self) -> None:  # noqa: B027
        """End a read that waits for frames, from any thread; a source that cannot wait for long has nothing to end."""

    def skip(self, time_s: float, seen: Callable[[Frame], object] | None = None) -> bool:
        """Pass over what is recorded up to the frame of ``time_s``, before the first :meth:`read`; False: nothing is.

        ``seen`` is shown each frame that is passed over.
        """
        while (frame := self.read()) is not None:
            if seen is not None:
                seen(frame)
            if frame.time_s >= time_s:
                break
        return True

    def close(self) -> None:
        """Let go of what is open; a source that failed stays FAILED."""
        if self.state is not State.FAILED:
            self.state = State.ENDED

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self.read()) is not None:
            yield frame


@dataclass(frozen=True, slots=True)
class Grabbed:
    """What is known of a picture before it is converted.

    ``stamp_s``: the source's own time, seconds. ``intra``: it can be decoded without those before it. ``corrupt``: it is
    damaged and not to be shown. Not ``decoded``: what came says that the link is alive, and cannot be made a picture of
    before one that stands alone has come.
    """

    stamp_s: float | None = None
    intra: bool = True
    corrupt: bool = False
    decoded: bool = True


class Connection(ABC):
    """One open link to a camera, read by one thread until it breaks; it is never mended, another one is opened.

    Opening one raises SourceError; SourceRefused where waiting does not help.
    """

    finished: bool = False  # it was a recording, and that has been read to its end
    problem: str | None = None  # why it broke, in a few words, where that is known
    mode: str = ""  # what a camera with several modes was opened as

    @abstractmethod
    def grab(self) -> Grabbed | None:
        """Wait for the next picture, no longer than the read timeout, without converting it; None: the link is broken."""

    @abstractmethod
    def retrieve(self) -> NDArray[np.uint8] | None:
        """The picture grabbed last, uint8 RGB ``[H, W, 3]``; None when it cannot be decoded."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; called by the thread that reads."""


class FrameSampler:
    """Picks frames by their timestamps: at most ``fps`` a second, the first one always. ``fps`` None takes every frame."""

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

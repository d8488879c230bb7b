"""Open sources from packages and users' files (classes or generator functions), and check each frame."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import numpy as np

from edgevlm.apps.sources.base import Frame, FrameSampler, Source, SourceOptions, State
from edgevlm.errors import SourceError
from edgevlm.runtime.plugins import blamed, load_class, place

RGB = "return uint8 RGB [H, W, 3]"
MANY = 64


class FrameCheck:
    """Checks the frames of one source. ``what``: the source's name in messages. ``made``: the source's class or function."""

    def __init__(self, what: str, made: Any) -> None:
        self._what, self._where, self._newest = what, f" ({place(made)})", -math.inf
        self._first, self._count = math.nan, 0

    def __call__(self, image: Any, seconds: Any) -> None:
        """Raise SourceError unless a frame is uint8 RGB ``[H, W, 3]`` and its time is finite and never decreases.

        Also raise SourceError if the first ``MANY`` frames all have the same time.
        """
        if not isinstance(image, np.ndarray):
            raise self.wrong(f"returned a {type(image).__name__} as an image; {RGB}")
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise self.wrong(f"returned an image of {image.dtype} {list(image.shape)}; {RGB}")
        if not isinstance(seconds, Real) or not math.isfinite(seconds):
            raise self.wrong(f"returned {seconds!r} as a frame's time; return seconds")
        if seconds < self._newest:
            raise self.wrong(f"returned a frame at {seconds!r} s after {self._newest:g} s; return increasing times")
        self._first, self._newest = self._first if self._count else float(seconds), float(seconds)
        self._count += 1
        if self._count == MANY:
            self.end()

    def end(self) -> None:
        """Raise SourceError if there were several frames but all had the same time."""
        if self._count > 1 and self._first == self._newest:
            raise self.wrong(f"returned {self._count} frames at {self._newest:g} s; return increasing times")

    def wrong(self, problem: str) -> SourceError:
        return SourceError(f"{self._what} {problem}{self._where}")


class GeneratorSource(Source):
    """A source that gets its frames from a generator function, which yields ``image`` or ``(seconds, image)``.

    ``target``, ``fps`` and ``options`` are passed to the function if it declares them as parameters. Frames without times start
    at 0 and are ``1 / fps`` seconds apart. Frames with times are sampled at ``fps``.
    """

    def __init__(self, name: str, function: Callable[..., Any], target: str, options: SourceOptions, check: FrameCheck) -> None:
        given, taken = {"target": target, "fps": options.fps, "options": options}, inspect.signature(function).parameters
        if unknown := [each.name for each in taken.values() if each.name not in given and each.default is each.empty]:
            raise check.wrong(f"requires a parameter {unknown[0]!r}; use only target, fps and options")
        self.name, self._fps, self._sampler, self._count, self._check = name, options.fps, FrameSampler(options.fps), 0, check
        self._frames: Iterator[Any] = function(**{key: value for key, value in given.items() if key in taken})

    def read(self) -> Frame | None:
        for found in self._frames:
            timed = isinstance(found, tuple) and len(found) == 2
            seconds, image = found if timed else (self._count / self._fps, found)
            self._check(image, seconds)
            self._count += 1
            self.state = State.RUNNING
            if not timed or self._sampler.wants(seconds):
                return Frame(image, float(seconds))
        self.close()
        return None

    def close(self) -> None:
        if self.state is not State.ENDED and (close := getattr(self._frames, "close", None)):
            close()
        super().close()


def open_plugin(name: str, target: str, options: SourceOptions) -> Source:
    """Open a source by its name or by ``./file.py:Name``.

    Raises SourceError for anything other than a Source class or a generator function. Reading the source raises SourceError for
    errors in its code and for invalid frames or times. The message names the source and its location.
    """
    made: Any = load_class("sources", name)
    what = f"source {name}"
    check = FrameCheck(what, made)
    if inspect.isgeneratorfunction(made):
        found: Any = GeneratorSource(name, made, target, options, check)
    elif isinstance(made, type) and issubclass(made, Source):
        opened: Any = made
        try:
            with blamed(what, made, SourceError):
                found = opened(target, options)
        except TypeError as error:  # the class is abstract, or does not take these arguments
            raise check.wrong(f"cannot be created with (target, options): {error}") from None
    else:
        raise check.wrong("is neither a subclass of edgevlm.extend.Source nor a generator function")
    found.name = getattr(found, "name", name)
    read, close = found.read, found.close

    def checked() -> Frame | None:
        with blamed(what, made, SourceError):
            frame = read()
        if isinstance(frame, Frame):
            if not isinstance(found, GeneratorSource):
                check(frame.image, frame.time_s)
        elif frame is None:
            check.end()
        else:
            raise check.wrong(f"returned a {type(frame).__name__}, not a Frame")
        return frame

    def closed() -> None:
        with blamed(what, made, SourceError):
            close()

    found.read, found.close = checked, closed
    return found

"""What is done to a frame in the thread that captured it, so that the one that watches need not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.gate import Gate
from edgevlm.apps.sources.base import Frame
from edgevlm.runtime.preprocess import Pixels


class Finish:
    """The gate, where there is one; then ``prepare``, a session's, on frames that pass."""

    def __init__(self, prepare: Callable[[NDArray[np.uint8]], Pixels], gate: Gate | None = None) -> None:
        self._prepare, self._gate = prepare, gate

    def __call__(self, frame: Frame) -> Frame:
        if self._gate is not None:
            frame = replace(frame, still=not self._gate(frame.image), gated=self._gate.gated)
        if frame.still:
            return frame
        frame = replace(frame, pixels=self._prepare(frame.image))
        if frame.laps is not None:
            frame.laps.lap("preprocess")
        return frame

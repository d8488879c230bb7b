"""What the capturing thread does to a frame: the gate, which drops near-static frames, then resizing for the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Frame
from edgevlm.errors import UserError
from edgevlm.runtime.policies.base import parse_settings
from edgevlm.runtime.preprocess import Pixels

CELLS = 32  # both ways: what is smaller than a cell fades
SAMPLES = 8  # pixels of a cell both ways, at most, that its mean is taken over
THRESHOLD = 4.0  # levels of 255: above a sensor's noise, below a person who fills a cell
EVERY = 8
RULES = ("off", "skip", "thin")


@dataclass(frozen=True, slots=True)
class GateRule:
    """``skip``: no near-static frame is watched; ``thin``: of those in a row every ``every``-th one is.

    ``threshold``: a frame is near-static when no cell of it differs by more from the last one let through, levels of 255.
    """

    name: str
    threshold: float = THRESHOLD
    every: int = EVERY

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 255:
            raise UserError(f"--gate {self.name}: threshold={self.threshold:g} is not from 0 to 255")
        if self.every < 2:
            raise UserError(f"--gate {self.name}: every={self.every} is less than 2")


def parse_gate(text: str) -> GateRule | None:
    """``off``, ``skip``, ``skip:threshold=6`` or ``thin:threshold=6,every=4``. Raises UserError for anything else."""
    name, settings = parse_settings(text)
    kinds = {"threshold": float, "every": int} if name == "thin" else {"threshold": float} if name == "skip" else {}
    if name not in RULES or not settings.keys() <= kinds.keys():
        raise UserError(
            f"--gate {text}: give off, skip[:threshold={THRESHOLD:g}] or thin[:threshold={THRESHOLD:g},every={EVERY}]"
        )
    try:
        values = {key: kinds[key](value) for key, value in settings.items()}
    except ValueError:
        raise UserError(f"--gate {text}: a threshold is a number of levels from 0 to 255, every an integer") from None
    return None if name == "off" else GateRule(name, **values)


class Gate:
    """Compares with the last frame let through, not with the last one seen, so that a slow change adds up."""

    def __init__(self, rule: GateRule) -> None:
        self.rule = rule
        self.gated = 0  # frames that were not let through
        self._last: NDArray[np.float32] | None = None
        self._still = 0  # near-static frames in a row

    def __call__(self, image: NDArray[np.uint8]) -> bool:
        """Whether to watch a frame, uint8 RGB ``[H, W, 3]``. The first one is, and one of another shape."""
        cells = cell_means(image, min(CELLS, image.shape[0]), min(CELLS, image.shape[1]))
        near = (
            self._last is not None
            and cells.shape == self._last.shape
            and float(np.abs(cells - self._last).max()) <= self.rule.threshold
        )
        self._still = self._still + 1 if near else 0
        if near and not (self.rule.name == "thin" and self._still % self.rule.every == 0):
            self.gated += 1
            return False
        self._last = cells
        return True


def cell_means(image: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.float32]:
    """Return the mean colours of ``rows`` x ``columns`` cells of an image ``[H, W, 3]``: ``[rows, columns, 3]``.

    A mean is taken over SAMPLES x SAMPLES evenly spaced pixels of a cell at most.
    """
    across, down = _samples(columns, image.shape[1]), _samples(rows, image.shape[0])
    blocks = image[down.reshape(-1, 1), across.reshape(1, -1)].reshape(*down.shape, *across.shape, 3)
    return blocks.mean(axis=(1, 3), dtype=np.float32)


def _samples(cells: int, size: int) -> NDArray[np.intp]:
    """``[cells, samples]`` positions on an edge of ``size`` pixels."""
    each = max(1, min(SAMPLES, size // cells))
    return ((np.arange(cells * each) + 0.5) * size / (cells * each)).astype(np.intp).reshape(cells, each)


class FramePreparation:
    """The gate, where there is one; then ``prepare``, a session's, on frames that pass.

    first: told the (height, width) of the first frame.
    """

    def __init__(
        self,
        prepare: Callable[[NDArray[np.uint8]], Pixels],
        gate: Gate | None = None,
        first: Callable[[tuple[int, int]], object] | None = None,
    ) -> None:
        self._prepare, self._gate, self._first = prepare, gate, first

    def __call__(self, frame: Frame) -> Frame:
        if self._first is not None:
            self._first((frame.image.shape[0], frame.image.shape[1]))
            self._first = None
        if self._gate is not None:
            frame = replace(frame, still=not self._gate(frame.image), gated=self._gate.gated)
        if frame.still:
            return frame
        frame = replace(frame, pixels=self._prepare(frame.image))
        if frame.timer is not None:
            frame.timer.mark("preprocess")
        return frame

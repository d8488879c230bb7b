"""Detect changes between frames by comparing the mean colours of their cells."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CELLS = 32  # cells in each direction; a detail smaller than a cell is averaged out
SAMPLES = 8
THRESHOLD = 4.0  # in grey levels, 0 to 255: above a sensor's noise, and below the change when a person fills a cell


class ChangeGate:
    """Decides whether a frame, uint8 RGB ``[H, W, 3]``, shows a change.

    A grid divides the frame into cells. The frame shows a change if any cell's mean colour differs by more than ``THRESHOLD``
    from the cell's mean colour in the last frame that showed a change. Slow changes therefore add up until a frame shows a
    change. The first frame always shows a change.
    """

    def __init__(self) -> None:
        self._last = np.zeros((0, 0, 3), np.float32)

    def __call__(self, image: NDArray[np.uint8]) -> bool:
        cells = cell_means(image, min(CELLS, image.shape[0]), min(CELLS, image.shape[1]))
        if cells.shape == self._last.shape and np.abs(cells - self._last).max() <= THRESHOLD:
            return False
        self._last = cells
        return True


def cell_means(image: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.float32]:
    """Divide an image ``[H, W, 3]`` into a grid of cells, and return the mean colour of each, ``[rows, columns, 3]``.

    A cell's mean uses at most ``SAMPLES`` x ``SAMPLES`` evenly spaced pixels.
    """
    across, down = _samples(columns, image.shape[1]), _samples(rows, image.shape[0])
    blocks = image[down.reshape(-1, 1), across.reshape(1, -1)].reshape(*down.shape, *across.shape, 3)
    return blocks.mean(axis=(1, 3), dtype=np.float32)


def _samples(cells: int, size: int) -> NDArray[np.intp]:
    """Return evenly spaced pixel positions for each cell along an edge of ``size`` pixels. Shape ``[cells, samples]``."""
    each = max(1, min(SAMPLES, size // cells))
    return ((np.arange(cells * each) + 0.5) * size / (cells * each)).astype(np.intp).reshape(cells, each)

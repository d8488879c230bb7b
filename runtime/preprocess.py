"""Convert frames to pixels as the checkpoint's image processor does: resize with antialiasing, rescale, normalise."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import VisionSpec

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
MOST_PIXELS = 1 << 26  # the largest frame or picture: 8192 x 8192, 192 MB decoded
MOST_EDGE = 1 << 14
BAND = 16
SMALL = 1 << 17  # the most multiplications in one matrix product: BLAS splits larger products among threads, which is slower


@dataclass(frozen=True, slots=True)
class Pixels:
    """A normalised frame for the vision tower, float32 ``[3, height, width]``. ``size``: (height, width) before resizing."""

    values: NDArray[np.float32]
    size: tuple[int, int] = (0, 0)


Band = tuple[slice, slice, NDArray[np.float32]]
"""The output pixels, the input pixels that they are made from, and the weights ``[n, m]``."""
Pass = tuple[list[Band], list[Band]]
"""The bands of a resize, for rows and for columns."""


class Preprocessor:
    """Converts uint8 RGB (or BGR) frames ``[H, W, 3]`` to the vision tower's input, float32 ``[3, height, width]``."""

    def __init__(self, spec: VisionSpec, *, bgr: bool = False) -> None:
        if spec.resample not in SUPPORT:
            raise UserError(f"unknown resampling {spec.resample!r}; choose from {', '.join(SUPPORT)}")
        self.spec, self._step = spec, -1 if bgr else 1
        self._mean = np.asarray(spec.mean, np.float32)[:, None, None]
        self._std = np.asarray(spec.std, np.float32)[:, None, None]
        self._passes: dict[tuple[int, int], list[Pass]] = {}

    def __call__(self, frame: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Resize and normalise a frame. Raises UserError for a frame that is not uint8 ``[H, W, 3]`` or is too large."""
        if not isinstance(frame, np.ndarray):
            raise UserError(f"a frame must be a numpy array, uint8 RGB [H, W, 3], not {type(frame).__name__}")
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape:
            raise UserError(f"a frame must be uint8 RGB [H, W, 3], not {frame.dtype} {list(frame.shape)}")
        if frame.shape[0] * frame.shape[1] > MOST_PIXELS or max(frame.shape) > MOST_EDGE:
            limits = f"at most {MOST_PIXELS:,} pixels, and {MOST_EDGE:,} per side"
            raise UserError(f"a frame of {frame.shape[1]}x{frame.shape[0]} is too large; {limits}")
        planes = np.ascontiguousarray(frame[..., :: self._step].transpose(2, 0, 1)).astype(np.float32)
        for rows, columns in self._resize(frame.shape[0], frame.shape[1]):
            planes = _down(_across(planes, columns), rows)
        planes *= np.float32(self.spec.rescale)
        planes -= self._mean
        planes /= self._std
        return planes

    def _resize(self, height: int, width: int) -> list[Pass]:
        if (found := self._passes.get((height, width))) is None:
            self._passes = {(height, width): (found := self._bands(height, width))}
        return found

    def _bands(self, height: int, width: int) -> list[Pass]:
        """Return the filter weights for resizing pictures of this size, one pass after another."""
        spec, method = self.spec, self.spec.resample
        sizes = [(height, width), (spec.size[0], spec.size[1])]
        if spec.fit == "longest":
            sizes.insert(1, longest(height, width, spec.longest_edge or max(spec.size)))
        elif sizes[0] == sizes[1]:
            return []
        if spec.fit == "crop":  # make weights only for the crop, because the longer edge may have a million pixels
            edge, short = spec.shortest_edge or min(spec.size), min(height, width)
            edges = [(side, int(edge * side / short), kept) for side, kept in zip((height, width), spec.size, strict=True)]
            rows, columns = (resize_bands(side, to, method, (to - kept) // 2, kept) for side, to, kept in edges)
            return [(rows, columns)]
        pairs = [[resize_bands(*sides, method) for sides in zip(*each, strict=True)] for each in pairwise(sizes)]
        return [(rows, columns) for rows, columns in pairs]


def _across(planes: NDArray[np.float32], columns: list[Band]) -> NDArray[np.float32]:
    """Resize a picture ``[3, H, W]`` to a new width, and round to integers, as Pillow does."""
    lines, width = planes.reshape(-1, planes.shape[2]), columns[-1][0].stop
    out = np.empty((len(lines), width), np.float32)
    for to, of, weights in columns:
        many = max(1, SMALL // weights.size)
        full = len(lines) - len(lines) % many
        for part, into in ((lines[:full], out[:full]), (lines[full:], out[full:])):
            blocks = (-1, many, lines.shape[1]) if len(part) >= many else (1, *part.shape)
            np.matmul(part.reshape(blocks)[:, :, of], weights.T, out=into.reshape(*blocks[:2], width)[:, :, to])
    return _levels(out).reshape(3, -1, width)


def _down(planes: NDArray[np.float32], rows: list[Band]) -> NDArray[np.float32]:
    """Resize a picture ``[3, H, W]`` to a new height, and round to integers."""
    out = np.empty((3, rows[-1][0].stop, planes.shape[2]), np.float32)
    for to, of, weights in rows:
        many = max(1, SMALL // weights.size)
        for left in range(0, planes.shape[2], many):
            np.matmul(weights, planes[:, of, left : left + many], out=out[:, to, left : left + many])
    return _levels(out)


def _levels(planes: NDArray[np.float32]) -> NDArray[np.float32]:
    np.rint(planes, out=planes)
    return np.clip(planes, 0, 255, out=planes)


def longest(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return SmolVLM's (height, width) of a picture whose longer edge becomes ``edge``. The shorter edge is made even."""
    aspect = width / height
    other = int(edge / aspect) if width >= height else int(edge * aspect)
    other = max(1, other + other % 2)
    return (other, edge) if width >= height else (edge, other)


def resize_bands(size: int, to: int, method: str, start: int = 0, count: int | None = None) -> list[Band]:
    """Return the filter weights with which Pillow resizes a line of pixels, as small matrices for a few output pixels each.

    ``size``, ``to``: the numbers of input and output pixels. ``method``: the name of Pillow's filter. ``start``, ``count``:
    which output pixels to return weights for, by default all.
    """
    scale, bands = size / to, list[Band]()
    stretch = max(scale, 1.0)
    reach, stop = SUPPORT[method] * stretch, start + (to if count is None else count)
    for first in range(start, stop, BAND):
        last = min(first + BAND, stop)
        centre = (np.arange(first, last) + 0.5) * scale
        low, high = max(0, int(centre[0] - reach)), min(size, int(centre[-1] + reach) + 1)
        distance = (np.arange(low, high)[None, :] + 0.5 - centre[:, None]) / stretch
        weights = _kernel(distance, method) * (np.abs(distance) < SUPPORT[method])
        weights /= weights.sum(1, keepdims=True)
        bands.append((slice(first - start, last - start), slice(low, high), weights.astype(np.float32)))
    return bands


def _kernel(x: NDArray[np.float64], method: str) -> NDArray[np.float64]:
    x = np.abs(x)
    if method == "bilinear":
        return 1 - x
    if method == "lanczos":
        return np.sinc(x) * np.sinc(x / 3)
    a = -0.5  # the parameter of Keys' cubic filter, as in Pillow
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x < 1, near, far)

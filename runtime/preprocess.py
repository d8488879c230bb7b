"""Frames to pixels, as the checkpoint's image processor does: resize with antialiasing, rescale, normalise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import VisionSpec

Pass = tuple[NDArray[np.float32], NDArray[np.float32]]  # one resampling: of rows [to, size], and of columns

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}


class Preprocessor:
    """Turns uint8 RGB ``[H, W, 3]`` into float32 ``[3, height, width]`` of the vision tower's size."""

    def __init__(self, spec: VisionSpec) -> None:
        if spec.resample not in SUPPORT:
            raise UserError(f"resampling {spec.resample!r} is not known; there are: {', '.join(SUPPORT)}")
        self.spec = spec
        self._mean = np.asarray(spec.mean, np.float32)[:, None, None]
        self._std = np.asarray(spec.std, np.float32)[:, None, None]
        self._passes: dict[tuple[int, int], list[Pass]] = {}

    def __call__(self, frame: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Raises UserError for anything but uint8 ``[H, W, 3]``."""
        if not isinstance(frame, np.ndarray):
            raise UserError(f"a frame is a numpy array, uint8 RGB [H, W, 3], not {type(frame).__name__}")
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape:
            raise UserError(f"a frame is uint8 RGB [H, W, 3], not {frame.dtype} {list(frame.shape)}")
        planes = frame.transpose(2, 0, 1).astype(np.float32)
        if planes.shape[1:] == tuple(self.spec.size) and self.spec.fit != "longest":
            passes: list[Pass] = []
        else:
            passes = self._resize(frame.shape[0], frame.shape[1])
        for rows, columns in passes:
            across = np.clip(np.rint(planes @ columns.T), 0, 255)  # Pillow goes through uint8 between its two passes
            planes = np.clip(np.rint(rows @ across), 0, 255)
        planes *= np.float32(self.spec.rescale)
        planes -= self._mean
        planes /= self._std
        return planes

    def _resize(self, height: int, width: int) -> list[Pass]:
        """The matrices for a source size; a camera changes its size seldom, so only the last one's are kept."""
        if (height, width) not in self._passes:
            method, (tall, wide) = self.spec.resample, self.spec.size
            passes: list[Pass] = []
            if self.spec.fit == "crop":
                scale = (self.spec.shortest_edge or min(self.spec.size)) / min(height, width)
                edges = ((height, tall), (width, wide))
                cut = [_cut(resize_matrix(size, int(size * scale), method), to) for size, to in edges]
                passes.append((cut[0], cut[1]))
            else:
                if self.spec.fit == "longest":
                    between = longest(height, width, self.spec.longest_edge or max(self.spec.size))
                    passes.append((resize_matrix(height, between[0], method), resize_matrix(width, between[1], method)))
                    height_now, width_now = between
                else:
                    height_now, width_now = height, width
                passes.append((resize_matrix(height_now, tall, method), resize_matrix(width_now, wide, method)))
            self._passes = {(height, width): passes}
        return self._passes[height, width]


def longest(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with the longer edge ``edge`` and the other in proportion, made even; as SmolVLM's processor has it."""
    aspect = width / height
    if width >= height:
        other = int(edge / aspect)
        return max(1, other + other % 2), edge
    other = int(edge * aspect)
    return edge, max(1, other + other % 2)


def _cut(matrix: NDArray[np.float32], to: int) -> NDArray[np.float32]:
    """The middle ``to`` output pixels."""
    start = (len(matrix) - to) // 2
    return matrix[start : start + to]


def resize_matrix(size: int, to: int, method: str) -> NDArray[np.float32]:
    """``[to, size]``: each row the antialiased filter weights of one output pixel (Pillow's resampling, as a matrix)."""
    scale = size / to
    stretch = max(scale, 1.0)
    centre = (np.arange(to) + 0.5) * scale
    distance = (np.arange(size)[None, :] + 0.5 - centre[:, None]) / stretch
    weights = _kernel(distance, method) * (np.abs(distance) < SUPPORT[method])
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _kernel(x: NDArray[np.float64], method: str) -> NDArray[np.float64]:
    x = np.abs(x)
    if method == "bilinear":
        return 1 - x
    if method == "lanczos":
        return np.sinc(x) * np.sinc(x / 3)
    a = -0.5  # Keys' cubic, as Pillow has it
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x < 1, near, far)

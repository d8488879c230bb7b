"""Frames that were watched and are not in the memory yet."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgevlm.engines.base import Engine
from edgevlm.runtime.bundle import VisionSpec

Float32 = NDArray[np.float32]


def chunk_bytes(frames: int, vision: VisionSpec) -> int:
    """Bytes of the pixels that a chunk of ``frames`` frames holds."""
    return frames * 3 * vision.size[0] * vision.size[1] * np.dtype(np.float32).itemsize


class Chunk:
    """Up to ``frames`` frames, encoded together when the chunk is full, or up to where a question comes: each frame once.

    limit: of the chunk at hand, at most ``frames``; set it between chunks.
    """

    def __init__(self, engine: Engine, vision: VisionSpec, frames: int) -> None:
        self.frames = self.limit = frames
        self.encode_ms = 0.0  # since the stream opened
        self._engine = engine
        self._pixels = np.empty((frames, 3, *vision.size), np.float32)
        self.clear()

    def clear(self) -> None:
        """Begin the next chunk; what was not appended is lost."""
        self.taken = self._encoded = 0
        self._features: Float32 | None = None  # of frames encoded and not appended

    def state(self) -> tuple[dict[str, int], dict[str, NDArray]]:
        """How many frames were taken and encoded, and what is not in the memory of them: features, and pixels not encoded."""
        features = {} if self._features is None else {"features": self._features}
        pixels = self._pixels[self._encoded : self.taken]
        return {"taken": self.taken, "encoded": self._encoded}, {"pixels": pixels, **features}

    def restore(self, counts: Mapping[str, int], arrays: Mapping[str, NDArray]) -> None:
        """Go on from what :meth:`state` was."""
        self.taken, self._encoded = counts["taken"], counts["encoded"]
        self._pixels[self._encoded : self.taken] = arrays["pixels"]
        self._features = arrays["features"].copy() if "features" in arrays else None

    @property
    def missing(self) -> int:
        """Frames until the chunk is full."""
        return max(0, self.limit - self.taken)

    def add(self, pixels: Float32) -> None:
        """Take one frame, normalised, ``[3, H, W]``."""
        self._pixels[self.taken] = pixels
        self.taken += 1

    def features(self) -> Float32:
        """Features ``[F, tokens_per_frame, hidden]`` of the frames that are not in the memory."""
        if self._features is None or self._encoded < self.taken:
            started = time.perf_counter()
            new = self._engine.encode(self._pixels[self._encoded : self.taken])
            self.encode_ms += 1e3 * (time.perf_counter() - started)
            self._features = new if self._features is None else np.concatenate([self._features, new])
            self._encoded = self.taken
        return self._features

    def appended(self, frames: int) -> None:
        """The first ``frames`` of :meth:`features` are in the memory now."""
        self._features = self.features()[frames:]

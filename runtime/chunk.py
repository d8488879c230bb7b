"""Frames that were watched and are not in the memory yet."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.bundle import VisionSpec
from edgevlm.runtime.changes import ChangedEncoder
from edgevlm.runtime.engine import Engine
from edgevlm.runtime.stateful import add_prefix, strip_prefix

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Chunk:
    """Up to ``frames`` frames, each encoded once: together when the chunk is full, or up to where a question comes.

    A tower that merges ``group`` frames takes them together. A question encodes an incomplete group with its last frame
    repeated; the group is encoded once more when it is complete. limit: frames of the chunk at hand, complete groups, at most
    ``frames``; set it between chunks. encoder: encodes frames one after another, instead of the engine's whole tower.
    """

    def __init__(self, engine: Engine, vision: VisionSpec, frames: int, encoder: ChangedEncoder | None = None) -> None:
        self.frames = self.limit = frames
        self.group = vision.group
        self.encode_ms = 0.0  # since the stream opened
        self.encoder = encoder
        self._engine = engine
        self._pixels = np.empty((frames, 3, *vision.size), np.float32)
        self._seconds = np.empty(frames)
        self._sizes = np.zeros((frames, 2), np.int32)
        self.clear()

    def clear(self) -> None:
        """Begin the next chunk; what was not appended is lost."""
        self.taken = self._encoded = 0  # frames; those encoded are complete groups
        self._features: Float32 | None = None  # of the groups encoded and not appended
        self._waiting: Float32 | None = None  # of the incomplete group, as it is

    def state(self) -> tuple[dict[str, int], dict[str, NDArray]]:
        """For a snapshot: how many frames were taken and encoded, and views of those that are not in the memory.

        Features ``[G, tokens_per_frame, width]`` of groups; of frames not encoded, those of an incomplete group among them, the
        pixels and the pictures' (height, width); when each was seen, seconds float64; and what the encoder keeps.
        """
        waiting, seconds = slice(self._encoded, self.taken), self._seconds[self._held() : self.taken]
        arrays: dict[str, NDArray] = {"pixels": self._pixels[waiting], "sizes": self._sizes[waiting], "seconds": seconds}
        if self._features is not None:
            arrays["features"] = self._features
        kept: dict[str, NDArray] = {} if self.encoder is None else add_prefix("encoder", self.encoder.state())
        return {"taken": self.taken, "encoded": self._encoded}, arrays | kept

    def restore(self, counts: Mapping[str, int], arrays: Mapping[str, NDArray]) -> None:
        """Restore what :meth:`state` returned. Raises ValueError where it cannot be of this chunk."""
        taken, encoded, features = counts["taken"], counts["encoded"], arrays.get("features")
        if not 0 <= encoded <= taken <= len(self._pixels):
            raise ValueError(f"{encoded} of {taken} frames of a chunk of {len(self._pixels)} are encoded")
        if features is not None and (
            features.dtype != np.float32 or features.ndim != 3 or self.group * len(features) > encoded
        ):
            raise ValueError(f"features are {features.dtype} {list(features.shape)} of {encoded} frames")
        self.taken, self._encoded = taken, encoded
        self._features, self._waiting = None if features is None else features.copy(), None
        waiting, seen = slice(encoded, taken), slice(self._held(), taken)
        kept = (("pixels", self._pixels[waiting]), ("sizes", self._sizes[waiting]), ("seconds", self._seconds[seen]))
        for name, place in kept:
            if (found := arrays[name]).dtype != place.dtype or found.shape != place.shape:
                raise ValueError(f"{name} are {found.dtype} {list(found.shape)} and not {place.dtype} {list(place.shape)}")
            place[:] = found
        if not np.isfinite(self._seconds[seen]).all():
            raise ValueError("seconds are not all finite")
        if self.encoder is not None:
            self.encoder.restore(strip_prefix("encoder", arrays))

    def _held(self) -> int:
        """The first frame that is not in the memory."""
        return self._encoded - self.group * (0 if self._features is None else len(self._features))

    @property
    def missing(self) -> int:
        """Frames until the chunk is full."""
        return max(0, self.limit - self.taken)

    @property
    def waiting(self) -> int:
        """Frames that are not in the memory yet."""
        return self.taken - self._held()

    def coming(self, *, complete: bool = False) -> int:
        """Groups of the chunk that are not among those that :meth:`encode` returns."""
        return self.limit // self.group - (self.taken if complete else self.taken + self.group - 1) // self.group

    def add(self, pixels: Float32, seconds: float = 0.0, size: tuple[int, int] = (0, 0)) -> None:
        """Take one frame, normalised, ``[3, H, W]``, seen at ``seconds``, made of a picture of (height, width) ``size``."""
        self._pixels[self.taken], self._seconds[self.taken], self._sizes[self.taken] = pixels, seconds, size
        self.taken += 1
        self._waiting = None

    def encode(self, *, complete: bool = False) -> Float32:
        """Return features ``[G, tokens_per_frame, width]`` of the groups not in the memory; only ``complete`` ones, or all."""
        end = self.taken - self.taken % self.group
        if self._features is None or self._encoded < end:
            new = self._run_tower(self._encoded, end)
            self._features = new if self._features is None else np.concatenate([self._features, new])
            self._encoded = end
        if complete or end == self.taken:
            return self._features
        if self._waiting is None:
            self._waiting = self._run_tower(end, self.taken, keep=False)
        return np.concatenate([self._features, self._waiting])

    def seconds(self, *, complete: bool = False) -> Float64:
        """When the first and the last frame of each group of :meth:`encode` were seen, ``[G, 2]``."""
        count = len(self.encode(complete=complete))
        end = self.taken - self.taken % self.group if complete else self.taken
        first = np.arange(-(-end // self.group) - count, -(-end // self.group)) * self.group
        return np.stack([self._seconds[first], self._seconds[np.minimum(first + self.group, end) - 1]], 1)

    def appended(self, groups: int) -> None:
        """Note that the first ``groups`` of :meth:`encode` are in the memory now; an incomplete one then waits no more."""
        known = self.encode(complete=True)
        if groups > len(known):
            self.taken = self._encoded = self._encoded + self.group
        self._features, self._waiting = known[groups:], None

    def _run_tower(self, start: int, end: int, *, keep: bool = True) -> Float32:
        """keep: False for a group that waits for others, whose frames come back."""
        started = time.perf_counter()
        if self.encoder is None:
            features = self._engine.encode(self._pixels[start:end])
        else:
            features = self.encoder.encode(self._pixels[start:end], self._sizes[start:end], keep=keep)
        self.encode_ms += 1e3 * (time.perf_counter() - started)
        return features

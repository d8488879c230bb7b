"""Frames that were watched and are not in the memory yet."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.bundle import VisionSpec
from edgevlm.runtime.changed_encoder import ChangedEncoder
from edgevlm.runtime.engine import Engine
from edgevlm.runtime.stateful import add_prefix, strip_prefix

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def chunk_bytes(frames: int, vision: VisionSpec) -> int:
    """Bytes of the pixels that a chunk of ``frames`` frames holds."""
    return frames * 3 * vision.size[0] * vision.size[1] * np.dtype(np.float32).itemsize


class Chunk:
    """Up to ``frames`` frames, encoded together when the chunk is full, or up to where a question comes: each frame once.

    A tower that merges ``group`` frames takes them together. One that waits for others of its group is encoded for a question,
    its last frame repeated, and once more with them. limit: of the chunk at hand, complete groups, at most ``frames``; set it
    between chunks. encoder: what encodes frames, one after another, instead of the engine's whole tower.
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
        self._waiting: Float32 | None = None  # of the group that is not complete, as it is

    def state(self) -> tuple[dict[str, int], dict[str, NDArray]]:
        """How many frames were taken and encoded, and what is not in the memory of them.

        Features ``[G, tokens_per_frame, width]`` of groups, pixels of frames not encoded, those of a group that is not complete
        among them, and the pictures' (height, width); when each was seen, seconds float64; and what the encoder keeps.
        """
        waiting, seconds = slice(self._encoded, self.taken), self._seconds[self._held() : self.taken]
        arrays: dict[str, NDArray] = {"pixels": self._pixels[waiting], "sizes": self._sizes[waiting], "seconds": seconds}
        if self._features is not None:
            arrays["features"] = self._features
        kept: dict[str, NDArray] = {} if self.encoder is None else add_prefix("encoder", self.encoder.state())
        return {"taken": self.taken, "encoded": self._encoded}, arrays | kept

    def restore(self, counts: Mapping[str, int], arrays: Mapping[str, NDArray]) -> None:
        """Go on from what :meth:`state` was."""
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
        """Groups of the chunk that are not among those of :meth:`features`."""
        return self.limit // self.group - (self.taken if complete else self.taken + self.group - 1) // self.group

    def add(self, pixels: Float32, seconds: float = 0.0, size: tuple[int, int] = (0, 0)) -> None:
        """Take one frame, normalised, ``[3, H, W]``, seen at ``seconds``, made of a picture of (height, width) ``size``."""
        self._pixels[self.taken], self._seconds[self.taken], self._sizes[self.taken] = pixels, seconds, size
        self.taken += 1
        self._waiting = None

    def features(self, *, complete: bool = False) -> Float32:
        """Features ``[G, tokens_per_frame, width]`` of the groups not in the memory; ``complete``: that wait for none."""
        end = self.taken - self.taken % self.group
        if self._features is None or self._encoded < end:
            new = self._encode(self._encoded, end)
            self._features = new if self._features is None else np.concatenate([self._features, new])
            self._encoded = end
        if complete or end == self.taken:
            return self._features
        if self._waiting is None:
            self._waiting = self._encode(end, self.taken, keep=False)
        return np.concatenate([self._features, self._waiting])

    def seconds(self, *, complete: bool = False) -> Float64:
        """When the first and the last frame of each group of :meth:`features` were seen, ``[G, 2]``."""
        count = len(self.features(complete=complete))
        end = self.taken - self.taken % self.group if complete else self.taken
        first = np.arange(-(-end // self.group) - count, -(-end // self.group)) * self.group
        return np.stack([self._seconds[first], self._seconds[np.minimum(first + self.group, end) - 1]], 1)

    def appended(self, groups: int) -> None:
        """The first ``groups`` of :meth:`features` are in the memory now; one that waited waits no more."""
        known = self.features(complete=True)
        if groups > len(known):
            self.taken = self._encoded = self._encoded + self.group
        self._features, self._waiting = known[groups:], None

    def _encode(self, start: int, end: int, *, keep: bool = True) -> Float32:
        """keep: whether these are frames to come back to, and not a group that waits for others."""
        started = time.perf_counter()
        if self.encoder is None:
            features = self._engine.encode(self._pixels[start:end])
        else:
            features = self.encoder.encode(self._pixels[start:end], self._sizes[start:end], keep=keep)
        self.encode_ms += 1e3 * (time.perf_counter() - started)
        return features

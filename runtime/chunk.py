"""Hold watched frames until they are appended to the memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.changes import ChangedEncoder
from edgevlm.runtime.engine import Engine
from edgevlm.runtime.stateful import add_prefix, strip_prefix

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Encoded(NamedTuple):
    """Encoded frames, or groups of merged frames. ``features``: ``[G, tokens_per_frame, width]``. ``seconds``: the times of
    each group's first and last frame, ``[G, 2]``. ``coming``: how many groups of the chunk are still to come.
    """

    features: Float32
    seconds: Float64
    coming: int = 0


class Chunk:
    """A buffer of frames that are encoded together when it is full or a question is asked.

    ``frames``: the number of frames that fit in the buffer. A tower that merges frames takes ``group`` frames at once. For a
    question, an incomplete group is encoded with its last frame repeated, and encoded again when the group is complete.
    ``limit``: the number of frames in the current chunk, a multiple of ``group`` up to ``frames``; set it between chunks.
    ``encoder``: used instead of the tower, if set.
    """

    def __init__(self, engine: Engine, bundle: Bundle, frames: int, encoder: ChangedEncoder | None = None) -> None:
        vision = bundle.vision
        self.limit, self.group, self.encoder = frames, vision.group, encoder
        self.encode_ms = 0.0  # the time spent encoding since the stream was opened
        self._engine = engine
        self._pixels = np.empty((frames, 3, *vision.size), np.float32)
        self._seconds = np.empty(frames)
        self._sizes = np.zeros((frames, 2), np.int32)
        self._nothing = np.zeros((0, vision.tokens_per_frame, bundle.decoder.row_width), np.float32)
        self.clear()

    def clear(self) -> None:
        """Start the next chunk and discard frames that were not appended."""
        self.taken = self._encoded = 0
        self._features = self._nothing  # features of groups that are encoded but not appended
        self._incomplete: Float32 | None = None

    def state(self) -> tuple[dict[str, int], dict[str, NDArray]]:
        """Return what a snapshot must hold: the numbers of received and encoded frames, and the frames that are not in the
        memory.

        The arrays are views, not copies. They contain the features of complete groups, the pixels and sizes of frames that are
        not encoded, each frame's time, and the encoder's state.
        """
        kept = {} if self.encoder is None else add_prefix("encoder", self.encoder.state())
        return {"taken": self.taken, "encoded": self._encoded}, {**self._unsaved(), "features": self._features, **kept}

    def _unsaved(self) -> dict[str, NDArray]:
        waiting, held = slice(self._encoded, self.taken), slice(self.taken - self.waiting, self.taken)
        return {"pixels": self._pixels[waiting], "sizes": self._sizes[waiting], "seconds": self._seconds[held]}

    def restore(self, counts: Mapping[str, int], arrays: Mapping[str, NDArray]) -> None:
        """Restore what :meth:`state` returned. Raises ValueError if the state does not fit this chunk."""
        taken, encoded, features = counts["taken"], counts["encoded"], arrays.get("features", self._nothing)
        if not 0 <= encoded <= taken <= len(self._pixels):
            raise ValueError(f"the chunk has {encoded} encoded and {taken} received frames of {len(self._pixels)}")
        frame = self._nothing.shape[1:]
        if features.dtype != np.float32 or features.shape[1:] != frame or self.group * len(features) > encoded:
            raise ValueError(f"features are {features.dtype} {list(features.shape)} for {encoded} frames of shape {frame}")
        self.taken, self._encoded, self._features, self._incomplete = taken, encoded, features.copy(), None
        for name, place in self._unsaved().items():
            if (found := arrays[name]).dtype != place.dtype or found.shape != place.shape:
                raise ValueError(f"{name} are {found.dtype} {list(found.shape)}, not {place.dtype} {list(place.shape)}")
            place[:] = found
        if not np.isfinite(arrays["seconds"]).all():
            raise ValueError("seconds must be finite")
        if self.encoder is not None:
            self.encoder.restore(strip_prefix("encoder", arrays))

    @property
    def has_place(self) -> bool:
        """Return whether the chunk would still have room after one more frame."""
        return self.taken + 1 < self.limit

    @property
    def waiting(self) -> int:
        """The number of frames that are not yet in the memory."""
        return self.taken - self._encoded + self.group * len(self._features)

    def add(self, pixels: Float32, seconds: float = 0.0, size: tuple[int, int] = (0, 0)) -> None:
        """Add one normalised frame ``[3, H, W]`` and its time in seconds. ``size``: the camera picture's (height, width)."""
        self._pixels[self.taken], self._seconds[self.taken], self._sizes[self.taken] = pixels, seconds, size
        self.taken += 1
        self._incomplete = None

    def encode(self, *, complete: bool = False) -> Encoded:
        """Encode the groups of frames that are not in the memory yet. ``complete``: encode only complete groups."""
        features, end = self._features, self.taken - self.taken % self.group
        if self._encoded < end:
            new = self._run_tower(self._encoded, end)
            features = self._features = np.concatenate([features, new]) if len(features) else new
            self._encoded = end
        if not complete and end < self.taken:
            if self._incomplete is None:
                self._incomplete = self._run_tower(end, self.taken, keep=False)
            features, end = np.concatenate([features, self._incomplete]), self.taken
        groups = -(-end // self.group)
        first = np.arange(groups - len(features), groups) * self.group
        seconds = np.stack([self._seconds[first], self._seconds[np.minimum(first + self.group, end) - 1]], 1)
        return Encoded(features, seconds, self.limit // self.group - groups)

    def appended(self, groups: int) -> None:
        """Drop the first ``groups`` complete groups, which have been appended to the memory."""
        self._features = self._features[groups:]

    def _run_tower(self, start: int, end: int, *, keep: bool = True) -> Float32:
        started = time.perf_counter()
        if self.encoder is None:
            features = self._engine.encode(self._pixels[start:end])
        else:
            features = self.encoder.encode(self._pixels[start:end], self._sizes[start:end], keep=keep)
        self.encode_ms += 1e3 * (time.perf_counter() - started)
        return features

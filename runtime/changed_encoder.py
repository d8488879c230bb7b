"""Frames to features, of which only the patches that changed are computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.changed_patches import PatchChanges
from edgevlm.runtime.engine import Engine, TowerBuffer
from edgevlm.runtime.pressure import available
from edgevlm.runtime.settings import EncodeChanged
from edgevlm.runtime.stateful import State, Stateful

Float32 = NDArray[np.float32]


class ChangedEncoder(Stateful):
    """Encodes the frames of one stream one after another. All it keeps is state: references, features and the tower's cache.

    The features of a patch that is not computed are those it had; what it then attended to may have changed since.
    """

    state_fields = ("changes", "_features", "_tower_cache", "seen", "computed")

    def __init__(self, engine: Engine, bundle: Bundle, settings: EncodeChanged, copies: int = 1) -> None:
        """copies: how many times its memory must be free. Raises UserError where it is not, and as ``Engine.bind_tower``."""
        vision = bundle.vision
        if (spec := vision.changed) is None:
            height, width = vision.size
            raise UserError(
                f"{bundle.path}: has no graph that encodes changed patches alone of frames of {width}x{height}; give --encode "
                "all, or export the checkpoint again (edgevlm export CHECKPOINT_DIR --out DIR)"
            )
        size, free = spec.cache_bytes, available().free
        if copies * size > free:
            raise UserError(
                f"what the vision tower keeps takes {copies * size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
                "give --encode all"
            )
        self._tower_cache = np.zeros(size, np.uint8)
        self._tower = engine.bind_tower(TowerBuffer.of(self._tower_cache))
        self.settings, self._group = settings, vision.group
        self.changes = PatchChanges(settings, vision, spec.grid)
        self._features = np.zeros((vision.tokens_per_frame, bundle.decoder.row_width), np.float32)
        self.seen = self.computed = 0  # patches

    @property
    def encoded(self) -> float:
        """Of the patches of frames, the fraction that was computed."""
        return self.computed / self.seen if self.seen else 1.0

    def encode(self, pixels: Float32, sizes: NDArray[np.int32], *, keep: bool = True) -> Float32:
        """Frames ``[F, 3, H, W]``, normalised, to features ``[G, tokens_per_frame, row_width]``, as ``Engine.encode``.

        sizes: (height, width) of the picture that each was made of, ``[F, 2]``. Without ``keep``, nothing is as it was changed
        to afterwards.
        """
        starts = range(0, len(pixels), self._group)
        features = [self._encode(pixels[at : at + self._group], sizes[at : at + self._group], keep) for at in starts]
        return np.stack(features) if features else np.zeros((0, *self._features.shape), np.float32)

    def _encode(self, frames: Float32, sizes: NDArray[np.int32], keep: bool) -> Float32:
        if missing := self._group - len(frames):
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, 0)])
        changed = self.changes.compare(frames, (int(sizes[-1, 0]), int(sizes[-1, 1])))
        features = self._features.copy()
        before = None if keep or not changed.patches.any() else self._tower_cache.copy()
        try:
            if changed.patches.any():
                found, tokens = self._tower.encode(
                    changed.pixels if self._group > 1 else changed.pixels[0], np.flatnonzero(changed.patches).astype(np.int32)
                )
                features[tokens] = found
        finally:
            if before is not None:
                self._tower_cache[:] = before
        if keep:
            self._features = features
            self.changes.encoded(changed)
            self.seen += len(changed.patches)
            self.computed += int(changed.patches.sum())
        return features

    def restore(self, state: State) -> None:
        """Go on from what :meth:`state` was. The tower is bound to its cache: that is filled, not replaced."""
        bound = self._tower_cache
        super().restore(state)
        bound[:] = self._tower_cache
        self._tower_cache = bound

"""InfiniPot-V as the authors' scripts run it, so that both sides of ``bench stream --against`` keep the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import Context, setting
from edgevlm.runtime.policies.infinipot_v import InfiniPotV

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Bool = NDArray[np.bool_]
Float64 = NDArray[np.float64]


@dataclass
class OfficialInfiniPotV(InfiniPotV):
    """The authors' program at 81a4dbe, without pooling; ``tau`` has no effect.

    The i-th oldest token of a head stands for patch ``i % p`` of frame ``i // p``, whatever it was. Of the frames held, the
    ``recent`` fraction is recent, rounded down, one at least; with ``alpha`` 0 none is.
    """

    recent: float = setting(0.25, "fraction of the frames held", at_least=0, at_most=1)

    name: ClassVar[str] = "infinipot-v-official"

    @property
    def basis(self) -> str:
        return ""

    @property
    def compress_to(self) -> int:
        frames = max(1, super().compress_to // self.shape.tokens_per_frame)
        return frames * self.shape.tokens_per_frame

    @property
    def needs_whole_frames(self) -> bool:
        return True

    @property
    def keeps_whole_frames(self) -> bool:
        return True

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        return {layer: self._as_frames(cache, layer, target) for layer, target in targets.items()}

    def _as_frames(self, cache: KVCache, layer: int, target: int) -> Bool:
        """Keep the prefix and ``target`` vision tokens a head, ``[kv_heads, n_l]``."""
        per_frame, kind, seq = self.shape.tokens_per_frame, cache.kind(layer), cache.seq(layer)
        vision = kind == Kind.VISION
        count = int(vision[0].sum())
        slots = np.argsort(np.where(vision, seq, np.iinfo(np.int64).max), 1, kind="stable")[:, :count]
        held = (cache.dequantize("key", layer), cache.dequantize("value", layer))
        key, value = (np.take_along_axis(part, slots[..., None], 1).astype(np.float64) for part in held)
        order, everything = np.take_along_axis(seq, slots, 1), np.ones(slots.shape, np.bool_)
        score = self.salience(cache, layer, np.linalg.norm(value, axis=-1))
        if self.alpha > 0:
            new = per_frame * max(1, int(self.recent * (count // per_frame)))
            past = everything & (np.arange(count) < count - new)
            distinct = np.zeros(slots.shape)
            distinct[:, : count - new] = distinctness(key, count - new, per_frame)
            quota = max(0, target - round((1 - self.alpha) * target) - new)
            score[~past | kernels.top_k(distinct.astype(np.float32), order, past, quota)] = np.inf
        kept = kernels.top_k(score.astype(np.float32), order, everything, target)
        keep: Bool = kind == Kind.PREFIX
        np.put_along_axis(keep, slots, kept, 1)
        return keep

    def salience(self, cache: KVCache, layer: int, norms: Float64) -> Float64:
        """VaN's score of value norms ``[kv_heads, n]``, oldest first."""
        return norms


def distinctness(key: Float64, past: int, per_frame: int) -> Float64:
    """Eq. 4 on pseudo-frames: minus the mean cosine with the recent keys of the same patch, ``[H, past]``.

    key: rotated, oldest first, ``[H, n, D]``, the first ``past`` of them old.
    """
    unit = key / (np.linalg.norm(key, axis=-1, keepdims=True) + 1e-9)
    frames = unit.reshape(len(key), -1, per_frame, key.shape[-1])
    old, new = frames[:, : past // per_frame], frames[:, past // per_frame :]
    similarity: Float64 = np.einsum("hfpd,hpd->hfp", old, new.mean(1))
    return -similarity.reshape(len(key), past)

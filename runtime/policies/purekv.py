"""PureKV: attention scores of low layers and value norms rank the cache of every layer. arXiv 2510.25600, eqs. 1 to 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.attention import CrossLayer, layer_number
from edgevlm.runtime.policies.base import Appended, Bool, Context, Float32, Needs, Policy, StreamShape, newest, setting

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

PRESET = 2  # the CLIE layer that does best in fig. 5


@dataclass
class PureKV(Policy):
    """Keep the newest tokens and those that the newest queries attend to, weighted by value norms; score low layers only.

    Ours: a token that the clie layer has evicted keeps its last score there; KV heads are joined by number.
    """

    clie: str = setting(
        "",
        "the layer whose attention ranks tokens in all layers above; empty: calibrated, else 2 (fig. 5)",
    )
    window: int = setting(32, "newest rows, which observe and stay; at most half of |C|", at_least=1)
    cross: bool = setting(True, "rank high layers by layer clie; off: each by its own attention (Tab. 4)")
    values: bool = setting(True, "weight by the value's L2 norm (Tab. 4)")
    st_spattn: bool = setting(
        False, "prefill frames with spatial-temporal sparse attention in high layers (sec. 3.2); keeps frame 0"
    )

    name: ClassVar[str] = "purekv"
    paper: ClassVar[str] = "PureKV, arXiv 2510.25600"
    state_fields = ("_cross",)

    def __post_init__(self) -> None:
        super().__post_init__()
        layer_number(self.clie)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        clie = layer_number(self.clie)
        if clie is None:
            clie = shape.calibration.clie if shape.calibration is not None else PRESET
        self._cross = CrossLayer(shape.layers, clie if self.cross else shape.layers, self.window, self.values)

    @property
    def basis(self) -> str:
        if not self.cross:
            return ""
        if self.clie:
            return f"clie {self._cross.clie}, as set"
        if self.shape.calibration is None:
            return "default layer, as the model's layers were not measured (edgevlm calibrate)"
        return f"calibrated {self.shape.calibration.described}: clie {self._cross.clie}"

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=self._cross.probe_layers, variant="st-spattn" if self.st_spattn else "full")

    @property
    def needs_whole_frames(self) -> bool:
        return self.st_spattn

    @property
    def max_append(self) -> int:
        """A quarter of |M|: as much is evicted as is asked, and a larger piece would see little of the past."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        self._cross.add(appended)

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        first_frame = self.shape.tokens_per_frame if self.keeps_first_frame else 0
        recent = min(self.window, max(0, self.budget - context.rows - first_frame) // 2)
        importance = self._cross.importance(cache, targets, self._cross.attention(cache, recent))
        return {layer: self._select(cache, layer, importance[layer], target, recent) for layer, target in targets.items()}

    def _select(self, cache: KVCache, layer: int, importance: Float32, target: int, recent: int) -> Bool:
        seq, keep = cache.seq(layer), self.protected(cache, layer)
        free = self.beside_first_frame(cache, layer, target)
        keep = keep | newest(seq, ~keep, min(recent, free))
        return keep | kernels.top_k(importance, seq, ~keep, free - min(recent, free))

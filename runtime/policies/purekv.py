"""PureKV: attention scores of low layers and value norms rank the cache of every layer. arXiv 2510.25600, eqs. 1 to 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime import kernels
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Appended, Bool, Guide, Needs, Plan, Policy, StreamShape, newest
from edgevlm.runtime.policies.cross_layer import CrossLayer, layer_number

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

PRESET = 2  # the CLIE layer that does best in fig. 5


@dataclass
class PureKV(Policy):
    """Keep the newest tokens and those that the newest queries attend to, weighted by value norms; no scores in high layers.

    clie: the layer whose attention ranks the tokens of all layers above it; empty: the calibrated one, else 2 (0 and 1 do
    worse, fig. 5). window: the newest rows, which stay and whose queries are the observers, at most half of what is kept.
    cross: off, every layer is ranked by its own attention (Tab. 4). values: weight by the L2 norm of the value (Tab. 4).
    st_spattn: prefill frames by sparse attention in space and time in high layers (sec. 3.2); frame 0 then stays, in |M|.

    Ours: a token that the clie layer has dropped keeps the last score it had there; KV heads of two layers meet by number.
    """

    clie: str = ""
    window: int = 32
    cross: bool = True
    values: bool = True
    st_spattn: bool = False

    name: ClassVar[str] = "purekv"
    paper: ClassVar[str] = "PureKV, arXiv 2510.25600"
    state_fields = ("_cross",)

    def __post_init__(self) -> None:
        layer_number(self.clie)
        if self.window < 1:
            raise ValueError("window is 1 or more")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        clie = layer_number(self.clie)
        if clie is None:
            clie = shape.calibration.clie if shape.calibration is not None else PRESET
        self._cross = CrossLayer(shape.layers, clie if self.cross else shape.layers, self.window, self.values)
        self._recent = 0

    @property
    def basis(self) -> str:
        if not self.cross:
            return ""
        if self.clie:
            return f"clie {self._cross.clie}, as set"
        if self.shape.calibration is None:
            return "presets; this model is not calibrated (edgevlm calibrate)"
        return f"calibrated {self.shape.calibration.described}: clie {self._cross.clie}"

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=self._cross.probe_layers, variant="st-spattn" if self.st_spattn else "whole")

    @property
    def room(self) -> int:
        """A quarter of |M|: as much is evicted as is asked, and a larger piece would see little of the past."""
        return max(self.budget // 4, self.shape.tokens_per_frame)

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        self._cross.add(appended)

    def before_append(self, cache: KVCache, rows: int, guide: Guide) -> Plan | None:
        kept = self.shape.tokens_per_frame if self.keeps_first_frame else 0
        self._recent = min(self.window, max(0, self.budget - rows - kept) // 2)
        return super().before_append(cache, rows, guide)

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        self._cross.score(cache, self._recent)

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        seq, keep = cache.seq(layer), self.protected(cache, layer)
        free = target - int((keep[0] & (cache.kind(layer)[0] == Kind.VISION)).sum())
        recent = newest(seq, ~keep, min(self._recent, free))
        rest = free - min(self._recent, free)
        return keep | recent | kernels.top_k(self._cross.importance(cache, layer), seq, ~(keep | recent), rest)

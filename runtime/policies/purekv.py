"""The policy PureKV (arXiv 2510.25600, eqs. 1 to 4) ranks tokens by the attention in low layers and by value norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.policies.attention import Int64, QueryWindow
from edgevlm.runtime.policies.base import Appended, EvictsOnDemand, Needs, StreamShape, setting
from edgevlm.runtime.policies.layer import Float32, Layer
from edgevlm.runtime.stateful import State

PRESET = 2  # the best CLIE layer in fig. 5


@dataclass
class PureKV(EvictsOnDemand):
    """Keep the newest tokens, and the tokens with the largest product of value norm and attention from the newest tokens.

    Ours: above the CLIE layer, a token that the CLIE layer has evicted keeps its last score.
    """

    clie: str = setting("", "layer whose attention ranks tokens in all layers above it; empty: calibrated, else 2 (fig. 5)")
    window: int = setting(32, "number of newest rows to keep, whose queries score older rows; at most half of |C|", at_least=1)
    st_spattn: bool = setting(
        False, "prefill frames with spatial-temporal sparse attention in high layers (sec. 3.2); keeps frame 0"
    )

    name: ClassVar[str] = "purekv"
    paper: ClassVar[str] = "PureKV, arXiv 2510.25600"
    state_fields = ("_queries", "_last_seq", "_last_mass")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clie and not self.clie.isdecimal():
            raise ValueError("clie must be a layer number, 0 or more, or empty")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        measured = shape.calibration.clie if shape.calibration is not None else PRESET
        self._clie = min(int(self.clie or measured), shape.layers - 1)
        self._queries = QueryWindow(self.window)
        self._last_seq: dict[int, Int64] = {}  # for each layer above clie, the seq of its tokens when they were last scored
        self._last_mass: dict[int, Float32] = {}

    def restore(self, state: State) -> None:
        """Restore a snapshot of this or an earlier version."""
        super().restore({name.removeprefix("cross."): array for name, array in state.items()})

    @property
    def basis(self) -> str:
        if self.clie:
            return f"clie {self._clie}, as set"
        if self.shape.calibration is None:
            return "default layer, as the model's layers were not measured (edgevlm calibrate)"
        return f"calibrated {self.shape.calibration.described}: clie {self._clie}"

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=tuple(range(self._clie + 1)), variant="st-spattn" if self.st_spattn else "full")

    @property
    def needs_whole_frames(self) -> bool:
        return self.st_spattn

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        self._queries.add(appended)

    def prepare(self, layers: Sequence[Layer]) -> tuple[int, list[Float32]]:
        """Return how many of the newest queries to use, and how important each row is to these queries."""
        first_frame = self.shape.tokens_per_frame if self.needs.keeps_first_frame else 0
        recent = min(self.window, max(0, self.budget - layers[0].coming - first_frame) // 2)
        return recent, self.importance(layers, recent)

    def compress(self, layer: Layer) -> None:
        recent, importance = layer.prepared
        newest = layer.newest(min(recent, layer.target))
        rest = layer.target - min(recent, layer.target)
        layer.keep(newest | layer.top(importance[layer.index], rest, layer.free & ~newest))

    def importance(self, layers: Sequence[Layer], window: int) -> list[Float32]:
        """Return each row's score times its value norm, in every layer. Scores come from the ``window`` newest queries.

        Up to the CLIE layer, eqs. 1 and 2 give the score. Above the CLIE layer, a token takes its score from the same KV head
        of the CLIE layer (eqs. 3 and 4). A token that the CLIE layer has evicted keeps its last score, or 0 if it was never
        scored. Each layer's array is ``[kv_heads, n]``.
        """
        found, clie = [], layers[self._clie]
        for layer in layers[: self._clie + 1]:
            queries, seq = self._queries.at(layer)
            start = max(0, len(seq) - window)
            found.append(layer.attention_of(queries[:, start:], seq=seq[start:]))
        for layer in layers[self._clie + 1 :]:
            seq, above = layer.seq, np.zeros(layer.seq.shape, np.float32)
            if layer.index in self._last_seq:
                kernels.join(seq, self._last_seq[layer.index], self._last_mass[layer.index], above)
            kernels.join(seq, clie.seq, found[self._clie], above)
            self._last_seq[layer.index], self._last_mass[layer.index] = seq.copy(), above
            found.append(above)
        return [mass * layer.value_norms for mass, layer in zip(found, layers, strict=True)]

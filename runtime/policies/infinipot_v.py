"""InfiniPot-V: temporal redundancy and value norms, per layer and KV head. arXiv 2506.15745, Algs. 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import Bool, Context, FixedTarget, Float32, StreamShape, frame_text, newest, setting

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

WINDOWS = (7, 5, 3, 1)


@dataclass
class InfiniPotV(FixedTarget):
    """Keep the r newest frames, the least redundant past tokens (TaR), and of the rest those with large value norms (VaN).

    Ours: keys are compared un-rotated, so position does not count as similarity. Tokens know their frame and patch after every
    compression, where the authors' program reshapes the rest into pseudo-frames; a past token whose patch no recent frame holds
    is maximally distinctive, and missing neighbours are left out of VaN's mean. Recent frames stay, as in Alg. 1; Alg. 2 does
    not mention them.
    """

    alpha: float = setting(0.5, "fraction of |C| for TaR, including recent frames", at_least=0, at_most=1)
    target: float = setting(0.75, "|C| / |M|", above=0, at_most=1)
    recent: float = setting(0.125, "r / f; at least one frame", at_least=0, at_most=1)
    tau: str = setting(
        "",
        "tau1/tau2/tau3: thresholds on the variation of a layer's value norms for VaN's windows 7, 5, 3, 1; preset: these "
        "windows by quartiles of depth; empty: calibrated, else preset",
    )

    name: ClassVar[str] = "infinipot-v"
    paper: ClassVar[str] = "InfiniPot-V, arXiv 2506.15745"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.thresholds = tuple(float(part) for part in self.tau.split("/") if part and self.tau != "preset")
        if self.thresholds and not (len(self.thresholds) == 3 and self.thresholds[0] < self.thresholds[1] < self.thresholds[2]):
            raise ValueError("tau takes three rising numbers, tau1/tau2/tau3, or preset")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        if not self.tau:
            self.thresholds = shape.calibration.thresholds if shape.calibration is not None else ()

    @property
    def basis(self) -> str:
        tau = "/".join(f"{threshold:.3g}" for threshold in self.thresholds)
        if self.tau:
            return f"thresholds {tau}, as set" if tau else "default thresholds, as set"
        if self.shape.calibration is None:
            return "default thresholds, as the model's layers were not measured (edgevlm calibrate)"
        return f"calibrated {self.shape.calibration.described}: thresholds {tau}"

    @property
    def recent_frames(self) -> int:
        """r = ceil(recent * f), f = |M| / p, at least 1."""
        return max(1, math.ceil(self.recent * self.budget / self.shape.tokens_per_frame - 1e-9))

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        """Alg. 1; in one call of the kernel where all layers are alike."""
        equal, recent_rows = set(targets.values()), self.recent_frames * self.shape.tokens_per_frame
        vision = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
        if all(recent_rows > target for target in equal):
            return {layer: newest(cache.seq(layer), vision[layer], target) for layer, target in targets.items()}
        distinct = {
            target: max(0, math.floor(self.alpha * target + 0.5) - recent_rows) for target in equal
        }  # past tokens by TaR
        if not self.shape.thinned and len(equal) == 1 and not any(frame_text(cache, layer).any() for layer in targets):
            (target,) = equal
            windows = [] if self.thresholds else [self._preset(layer) for layer in range(self.shape.layers)]
            keep = kernels.infinipot_select(cache, self.recent_frames, distinct[target], target, windows, self.thresholds)
            return {layer: keep[layer] for layer in targets}
        recent = [
            newest(cache.seq(layer), of, recent_rows)  # where only what changed enters, as many rows as whole frames have
            if self.shape.thinned
            else kernels.newest_frames(cache.frame(layer), of, self.recent_frames)
            for layer, of in enumerate(vision)
        ]
        scores, kept = kernels.infinipot_scores(cache, recent, vision), {}
        for layer, target in targets.items():
            seq, among, (similarity, norms) = cache.seq(layer), vision[layer], scores[layer]
            if recent_rows > target:
                kept[layer] = newest(seq, among, target)
                continue
            chosen = recent[layer] | kernels.top_k(-similarity, seq, among & ~recent[layer], distinct[target])
            window = self._window(layer, norms[among])
            norms = kernels.pool_norms(norms, cache.frame(layer), cache.row(layer), cache.col(layer), among, window)
            kept[layer] = kernels.top_k(np.where(chosen, np.float32(np.inf), norms), seq, among, target)
        return kept

    def _preset(self, layer: int) -> int:
        return WINDOWS[4 * layer // self.shape.layers]

    def _window(self, layer: int, norms: Float32) -> int:
        """The pooling window of a layer: Alg. 2, lines 16 to 21, or the preset by depth."""
        if not self.thresholds:
            return self._preset(layer)
        return WINDOWS[int(np.searchsorted(self.thresholds, variation(norms), side="right"))]


def variation(norms: Float32) -> float:
    """The coefficient of variation, sigma / mu, of value norms (Alg. 2, line 18); all heads of a layer together."""
    return float(np.std(norms, dtype=np.float64) / max(float(np.mean(norms, dtype=np.float64)), 1e-30))

"""The policy InfiniPot-V (arXiv 2506.15745, Algs. 1 and 2) ranks tokens by temporal redundancy and value norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import FixedTarget, StreamShape, setting
from edgevlm.runtime.policies.layer import Bool, Float32, Layer

WINDOWS = (7, 5, 3, 1)


@dataclass
class InfiniPotV(FixedTarget):
    """Keep the r newest frames, the least redundant past tokens (TaR), and other tokens with large value norms (VaN).

    Ours: keys are compared un-rotated, so a token's position does not affect similarity. Each token stays assigned to its frame
    and patch, whereas the authors' code regroups the remaining tokens into pseudo-frames. A past token counts as least
    redundant if its patch is in no recent frame. VaN's mean over neighbouring patches skips missing patches. Recent frames
    stay, as in Alg. 1, although Alg. 2 does not mention them.
    """

    alpha: float = setting(0.5, "fraction of |C| for recent frames and the tokens selected by TaR", at_least=0, at_most=1)
    target: float = setting(0.75, "fraction of |M| that a compression keeps", above=0, at_most=1)
    recent: float = setting(
        0.125, "r / f: fraction of the budget's frames that count as recent; at least one frame", at_least=0, at_most=1
    )
    tau: str = setting(
        "",
        "tau1/tau2/tau3: thresholds on the coefficient of variation of a layer's value norms, which select VaN's window 7, 5, "
        "3 or 1; preset: select the window by the layer's quartile of depth; empty: use calibrated thresholds, else preset",
    )

    name: ClassVar[str] = "infinipot-v"
    paper: ClassVar[str] = "InfiniPot-V, arXiv 2506.15745"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.thresholds = tuple(float(part) for part in self.tau.split("/") if part and self.tau != "preset")
        if self.thresholds and not (len(self.thresholds) == 3 and self.thresholds[0] < self.thresholds[1] < self.thresholds[2]):
            raise ValueError("tau must be three increasing numbers, tau1/tau2/tau3, or preset")

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
        """The number of recent frames: ``recent`` times the frames that fit in the budget, rounded up, but at least 1."""
        return max(1, math.ceil(self.recent * self.budget / self.shape.tokens_per_frame - 1e-9))

    def prepare(self, layers: Sequence[Layer]) -> list[Bool] | list[tuple[Float32, Float32]] | None:
        """Return each layer's mask of rows to keep. Return TaR and VaN scores if one kernel call cannot choose the rows."""
        due = [layer for layer in layers if int(layer.free[0].sum()) > layer.target]
        targets, recent_rows, cache = {layer.target for layer in due}, self._recent_rows, layers[0].cache
        if all(recent_rows > target for target in targets):
            return None
        if not self.shape.thinned and len(targets) == 1 and not any((layer.kind == Kind.TEXT).any() for layer in due):
            (target,) = targets
            windows = [] if self.thresholds else [self._preset(layer) for layer in range(self.shape.layers)]
            return kernels.infinipot_select(cache, self.recent_frames, self._distinct(target), target, windows, self.thresholds)
        return kernels.infinipot_scores(
            cache, [self._recent(layer) for layer in layers], [vision_of(layer) for layer in layers]
        )

    def compress(self, layer: Layer) -> None:
        """Choose the rows to keep, as Alg. 1 does."""
        if self._recent_rows > layer.target:
            layer.keep(layer.newest(layer.target, vision_of(layer)))
            return
        if isinstance(found := layer.prepared[layer.index], np.ndarray):
            layer.keep(found)
            return
        similarity, norms = found
        among, recent = vision_of(layer), self._recent(layer)
        chosen = recent | layer.top(-similarity, self._distinct(layer.target), among & ~recent)
        window = self._window(layer.index, norms[among])
        norms = kernels.pool_norms(norms, layer.frame, layer.row, layer.col, among, window)
        layer.keep(layer.top(np.where(chosen, np.float32(np.inf), norms), layer.target, among))

    @property
    def _recent_rows(self) -> int:
        return self.recent_frames * self.shape.tokens_per_frame

    def _recent(self, layer: Layer) -> Bool:
        """Return a mask of the recent frames' rows.

        If only changed tokens are appended, the mask selects the newest ``_recent_rows`` rows.
        """
        if self.shape.thinned:
            return layer.newest(self._recent_rows, vision_of(layer))
        return kernels.newest_frames(layer.frame, vision_of(layer), self.recent_frames)

    def _distinct(self, target: int) -> int:
        return max(0, math.floor(self.alpha * target + 0.5) - self._recent_rows)

    def _preset(self, layer: int) -> int:
        return WINDOWS[4 * layer // self.shape.layers]

    def _window(self, layer: int, norms: Float32) -> int:
        """Return the width of VaN's pooling window in a layer (Alg. 2, lines 16 to 21), or the preset for the layer's depth."""
        if not self.thresholds:
            return self._preset(layer)
        return WINDOWS[int(np.searchsorted(self.thresholds, variation(norms), side="right"))]


def vision_of(layer: Layer) -> Bool:
    vision: Bool = layer.kind == Kind.VISION
    return vision


def variation(norms: Float32) -> float:
    """Return the coefficient of variation, sigma / mu, of the value norms of all heads of a layer (Alg. 2, line 18)."""
    return float(np.std(norms, dtype=np.float64) / max(float(np.mean(norms, dtype=np.float64)), 1e-30))

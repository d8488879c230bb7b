"""InfiniPot-V: temporal redundancy of keys (TaR) and pooled value norms (VaN). arXiv 2506.15745, Algs. 1 and 2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Bool, Guide, Policy, StreamShape, frame_text, newest, tokens_of
from edgevlm.runtime.policies.infinipot_v_official import official_choice

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

WINDOWS = (7, 5, 3, 1)


class Scored(NamedTuple):
    """One layer, each ``[kv_heads, n]``: its vision rows, those of the recent frames, and the two scores before pooling."""

    vision: Bool
    recent: Bool
    similarity: np.ndarray
    norms: np.ndarray


@dataclass
class InfiniPotV(Policy):
    """Keep the r newest frames whole, the least redundant past tokens (TaR), and of the rest those of high value norm (VaN).

    alpha: share of |C| that goes to TaR, the recent frames counted in. target: |C| / |M|. recent: r / f, rounded up, at least
    one frame. mode: ``official`` appends, compresses to whole frames and chooses as the authors' program does, by alpha, target
    and recent alone. keys: compare keys ``unrotated`` (ours) or ``rotated`` (as the authors' program does). heads: each KV head
    chooses its own tokens, or all heads of a layer share the choice by mean score. keep_recent: Alg. 1 keeps the recent
    frames; Alg. 2 (off) leaves them to VaN. tau: thresholds tau1 < tau2 < tau3 on the coefficient of variation of a layer's
    value norms, as ``tau1/tau2/tau3``, for VaN's windows 7, 5, 3, 1; ``preset``: those windows by quartiles of depth; empty:
    the thresholds measured for the model if it was calibrated, else the preset. tar: likeness patch by patch; ``frame``: by the
    mean over a frame's patches, so that frames stay or go whole; ``reverse``: the most alike stay. van: norms ``pooled`` over
    those windows, or ``plain``; ``reverse``: the smallest norms stay, not pooled. Both as in Tab. 5.

    Ours: keys are compared before their rotary embedding, so that position does not pass for likeness. A token knows its frame
    and patch after every compression, where the authors' program reshapes what is left into pseudo-frames; a past token whose
    patch no recent frame holds is maximally distinctive, and absent neighbours are left out of VaN's mean. There is room before
    rows come, where the program appends and then compresses. The recent frames stay as in Alg. 1, of which Alg. 2 says nothing.
    What Tab. 5 calls TaR Frame is not written out in the paper.
    """

    alpha: float = 0.5
    target: float = 0.75
    recent: float = 0.125
    mode: Literal["streaming", "official"] = "streaming"
    keys: Literal["unrotated", "rotated"] = "unrotated"
    heads: Literal["own", "shared"] = "own"
    keep_recent: bool = True
    tau: str = ""
    tar: Literal["patch", "frame", "reverse"] = "patch"
    van: Literal["pooled", "plain", "reverse"] = "pooled"

    name: ClassVar[str] = "infinipot-v"
    paper: ClassVar[str] = "InfiniPot-V, arXiv 2506.15745"

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and 0 < self.target <= 1 and 0 <= self.recent <= 1):
            raise ValueError("alpha and recent lie in 0..1 and target in (0, 1]")
        self.thresholds = tuple(float(part) for part in self.tau.split("/") if part and self.tau != "preset")
        if self.thresholds and not (len(self.thresholds) == 3 and self.thresholds[0] < self.thresholds[1] < self.thresholds[2]):
            raise ValueError("tau takes three rising numbers, tau1/tau2/tau3, or preset")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        if not self.tau:
            self.thresholds = shape.calibration.thresholds if shape.calibration is not None else ()

    @property
    def basis(self) -> str:
        if self.van != "pooled":
            return ""  # no window
        tau = "/".join(f"{threshold:.3g}" for threshold in self.thresholds)
        if self.tau:
            return f"thresholds {tau}, as set" if tau else "presets, as set"
        if self.mode == "official":
            return "presets of mode=official"
        if self.shape.calibration is None:
            return "presets; this model is not calibrated (edgevlm calibrate)"
        return f"calibrated {self.shape.calibration.described}: thresholds {tau}"

    @property
    def compress_to(self) -> int:
        target = tokens_of(self.target, self.budget)
        frames = max(1, target // self.shape.tokens_per_frame)
        return frames * self.shape.tokens_per_frame if self.mode == "official" else target

    @property
    def appends_first(self) -> bool:
        return self.mode == "official"

    @property
    def recent_frames(self) -> int:
        """r = ceil(recent * f), f = |M| / p, at least 1."""
        return max(1, math.ceil(self.recent * self.budget / self.shape.tokens_per_frame - 1e-9))

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        self._scored: list[Scored] = []  # of this compression, made when a layer first asks
        self._kept: list[Bool] = []  # the same

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        if self.mode == "official":
            whole = target - target % self.shape.tokens_per_frame
            return official_choice(cache, layer, whole, self.shape.tokens_per_frame, self.alpha, self.recent)
        kind, seq = cache.kind(layer), cache.seq(layer)
        fixed = kind == Kind.PREFIX
        recent_rows = self.recent_frames * self.shape.tokens_per_frame
        if recent_rows > target:
            return fixed | newest(seq, kind == Kind.VISION, target)
        alike = not frame_text(cache, layer).any()  # all layers have the same target
        if alike and (self.heads, self.tar, self.van) == ("own", "patch", "pooled"):
            self._kept = self._kept or self._select_all(cache, target)
            return self._kept[layer]
        self._scored = self._scored or self._score(cache)
        vision, recent, similarity, norms = self._scored[layer]
        past = vision & ~recent
        if self.tar == "frame":
            similarity = frame_means(similarity, cache.frame(layer), past)
        score = self._per_head(similarity if self.tar == "reverse" else -similarity)
        chosen = kernels.top_k(score, seq, past, self._quota(target))
        if self.keep_recent:
            chosen |= recent
        if self.van == "pooled":
            window = self._window(layer, norms[vision])
            norms = kernels.pool_norms(norms, cache.frame(layer), cache.row(layer), cache.col(layer), vision, window)
        salient = np.where(chosen, np.float32(np.inf), self._per_head(-norms if self.van == "reverse" else norms))
        return fixed | kernels.top_k(salient, seq, vision, target)

    def _quota(self, target: int) -> int:
        """Past tokens that TaR chooses."""
        recent_rows = self.recent_frames * self.shape.tokens_per_frame
        return max(0, math.floor(self.alpha * target + 0.5) - recent_rows * self.keep_recent)

    def _select_all(self, cache: KVCache, target: int) -> list[Bool]:
        """The choice of every layer, whose targets are equal, in one call of the kernels."""
        windows = [] if self.thresholds else [self._preset(layer) for layer in range(self.shape.layers)]
        return kernels.infinipot_select(
            cache, self.recent_frames, self._quota(target), target, windows, self.thresholds,
            keep_recent=self.keep_recent, rotated=self.keys == "rotated",
        )  # fmt: skip

    def _score(self, cache: KVCache) -> list[Scored]:
        """Every layer in one call, so that keys and values are read once and by all threads."""
        vision = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
        recent = [kernels.newest_frames(cache.frame(layer), among, self.recent_frames) for layer, among in enumerate(vision)]
        scores = kernels.infinipot_scores(cache, recent, vision, rotated=self.keys == "rotated")
        return [Scored(seen, new, *score) for seen, new, score in zip(vision, recent, scores, strict=True)]

    def _per_head(self, score: np.ndarray) -> np.ndarray:
        """Scores ``[kv_heads, n]`` as they are, or averaged so that all heads of the layer choose alike."""
        if self.heads == "own":
            return score
        return np.broadcast_to(score.mean(0, dtype=np.float64).astype(np.float32), score.shape)

    def _preset(self, layer: int) -> int:
        return WINDOWS[4 * layer // self.shape.layers]

    def _window(self, layer: int, norms: np.ndarray) -> int:
        """The pooling window of a layer: Alg. 2, lines 16 to 21, or the preset by depth."""
        if not self.thresholds:
            return self._preset(layer)
        return WINDOWS[int(np.searchsorted(self.thresholds, variation(norms), side="right"))]


def frame_means(score: np.ndarray, frame: np.ndarray, among: Bool) -> np.ndarray:
    """Per head, the mean score of each row's frame over the rows of ``among``: float32 ``[kv_heads, n]``, 0 elsewhere."""
    means = np.zeros_like(score)
    for head, rows in enumerate(among):
        _, place = np.unique(frame[head, rows], return_inverse=True)
        means[head, rows] = (np.bincount(place, score[head, rows]) / np.bincount(place))[place]
    return means


def variation(norms: np.ndarray) -> float:
    """The coefficient of variation, sigma / mu, of value norms (Alg. 2, line 18); all heads of a layer together."""
    return float(np.std(norms, dtype=np.float64) / max(float(np.mean(norms, dtype=np.float64)), 1e-30))

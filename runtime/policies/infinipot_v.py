"""InfiniPot-V: temporal redundancy of keys (TaR) and pooled value norms (VaN). arXiv 2506.15745, Algs. 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import Bool, Context, Float32, Policy, StreamShape, frame_text, newest, setting, tokens_of

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Float64 = NDArray[np.float64]
WINDOWS = (7, 5, 3, 1)
RECENT, OFFICIAL_RECENT = 0.125, 0.25  # of the paper; of the authors' program, its query_ratio


class LayerScores(NamedTuple):
    """One layer, each ``[kv_heads, n]``: its vision rows, those of the recent frames, and the two scores before pooling."""

    vision: Bool
    recent: Bool
    similarity: Float32
    norms: Float32


@dataclass
class InfiniPotV(Policy):
    """Keep the r newest frames, the least redundant past tokens (TaR), and of the rest those with large value norms (VaN).

    Ours: keys are compared un-rotated, so position does not count as similarity. Tokens know their frame and patch after every
    compression, where the authors' program reshapes the rest into pseudo-frames; a past token whose patch no recent frame holds
    is maximally distinctive, and missing neighbours are left out of VaN's mean. Recent frames stay, as in Alg. 1; Alg. 2 does
    not mention them. The paper does not define TaR Frame.
    """

    alpha: float = setting(0.5, "fraction of |C| for TaR, including recent frames", at_least=0, at_most=1)
    target: float = setting(0.75, "|C| / |M|", above=0, at_most=1)
    recent: str = setting("", "r / f; at least one frame; empty: 0.125, and 0.25 of the frames held for official")
    official: Literal["off", "head", "head-pooled", "first-pooled"] = setting(
        "off",
        "as the authors' program: head as its scripts run it, without pooling; head-pooled, first-pooled with its "
        "--adaptive_pooling, at 81a4dbe and at the first commit; only alpha, target and recent apply",
    )
    keys: Literal["unrotated", "rotated"] = setting("unrotated", "compare keys un-rotated, or rotated as the authors' program")
    heads: Literal["own", "shared"] = setting(
        "own", "each KV head keeps its own tokens, or all heads of a layer share by mean score"
    )
    keep_recent: bool = setting(True, "keep recent frames (Alg. 1); off: leave them to VaN (Alg. 2)")
    tau: str = setting(
        "",
        "tau1/tau2/tau3: thresholds on the variation of a layer's value norms for VaN's windows 7, 5, 3, 1; preset: these "
        "windows by quartiles of depth; empty: calibrated, else preset",
    )
    tar: Literal["patch", "frame", "reverse"] = setting(
        "patch",
        "compare patch by patch; frame: by the mean over a frame's patches, so that whole frames go; reverse: keep the most "
        "similar (Tab. 5)",
    )
    van: Literal["pooled", "plain", "reverse"] = setting(
        "pooled", "pool norms over the windows; plain: do not; reverse: keep the smallest, not pooled (Tab. 5)"
    )

    name: ClassVar[str] = "infinipot-v"
    paper: ClassVar[str] = "InfiniPot-V, arXiv 2506.15745"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._recent_fraction = recent_fraction(self.recent or str(RECENT if self.official == "off" else OFFICIAL_RECENT))
        self.thresholds = tuple(float(part) for part in self.tau.split("/") if part and self.tau != "preset")
        if self.thresholds and not (len(self.thresholds) == 3 and self.thresholds[0] < self.thresholds[1] < self.thresholds[2]):
            raise ValueError("tau takes three rising numbers, tau1/tau2/tau3, or preset")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        if not self.tau:
            self.thresholds = shape.calibration.thresholds if shape.calibration is not None else ()

    @property
    def basis(self) -> str:
        if self.official != "off":
            return f"official={self.official}"
        if self.van != "pooled":
            return ""  # no window
        tau = "/".join(f"{threshold:.3g}" for threshold in self.thresholds)
        if self.tau:
            return f"thresholds {tau}, as set" if tau else "default thresholds, as set"
        if self.shape.calibration is None:
            return "default thresholds, as the model's layers were not measured (edgevlm calibrate)"
        return f"calibrated {self.shape.calibration.described}: thresholds {tau}"

    @property
    def compress_to(self) -> int:
        target = tokens_of(self.target, self.budget)
        frames = max(1, target // self.shape.tokens_per_frame)
        return frames * self.shape.tokens_per_frame if self.keeps_whole_frames else target

    @property
    def needs_whole_frames(self) -> bool:
        """The authors' program takes each p rows for a frame."""
        return self.official != "off"

    @property
    def keeps_whole_frames(self) -> bool:
        return self.official != "off"

    @property
    def recent_frames(self) -> int:
        """r = ceil(recent * f), f = |M| / p, at least 1."""
        return max(1, math.ceil(self._recent_fraction * self.budget / self.shape.tokens_per_frame - 1e-9))

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        if self.official != "off":
            return {layer: self._official(cache, layer, target) for layer, target in targets.items()}
        recent_rows, equal = self.recent_frames * self.shape.tokens_per_frame, set(targets.values())
        if all(recent_rows > target for target in equal):
            return {layer: self._newest(cache, layer, target) for layer, target in targets.items()}
        plain = (self.heads, self.tar, self.van) == ("own", "patch", "pooled") and not self.shape.thinned
        if plain and len(equal) == 1 and not any(frame_text(cache, layer).any() for layer in targets):
            keep = self._select_all(cache, *equal)
            return {layer: keep[layer] for layer in targets}
        scored = self._score(cache)
        return {layer: self._select(cache, layer, scored[layer], target) for layer, target in targets.items()}

    def _official(self, cache: KVCache, layer: int, target: int) -> Bool:
        """The choice of the authors' program, ``[kv_heads, n_l]``: the prefix and ``target`` vision tokens a head.

        The i-th oldest token of a head stands for patch ``i % p`` of frame ``i // p``, whatever it was. Of the frames now held
        the ``recent`` fraction is recent, rounded down, one at least; with ``alpha`` 0 none is.
        """
        per_frame, kind, seq = self.shape.tokens_per_frame, cache.kind(layer), cache.seq(layer)
        vision = kind == Kind.VISION
        count = int(vision[0].sum())
        slots = np.argsort(np.where(vision, seq, np.iinfo(np.int64).max), 1, kind="stable")[:, :count]
        held = (cache.dequantize("key", layer), cache.dequantize("value", layer))
        key, value = (np.take_along_axis(part, slots[..., None], 1).astype(np.float64) for part in held)
        order, everything = np.take_along_axis(seq, slots, 1), np.ones(slots.shape, np.bool_)
        score = np.linalg.norm(value, axis=-1)
        if self.official != "head":
            rows = int(cache.row(layer)[vision].max()) + 1
            quarter = min(3, layer // max(1, cache.layers // 4))
            score = official_pooling(score, self.official, quarter, per_frame, rows)
        if self.alpha > 0:
            new = per_frame * max(1, int(self._recent_fraction * (count // per_frame)))
            past = everything & (np.arange(count) < count - new)
            distinct = np.zeros(slots.shape)
            distinct[:, : count - new] = official_distinctness(key, count - new, per_frame)
            quota = max(0, target - round((1 - self.alpha) * target) - new)
            score[~past | kernels.top_k(distinct.astype(np.float32), order, past, quota)] = np.inf
        kept = kernels.top_k(score.astype(np.float32), order, everything, target)
        keep: Bool = kind == Kind.PREFIX
        np.put_along_axis(keep, slots, kept, 1)
        return keep

    def _newest(self, cache: KVCache, layer: int, target: int) -> Bool:
        return newest(cache.seq(layer), cache.kind(layer) == Kind.VISION, target)

    def _select(self, cache: KVCache, layer: int, scored: LayerScores, target: int) -> Bool:
        vision, recent, similarity, norms = scored
        seq, past = cache.seq(layer), vision & ~recent
        if self.recent_frames * self.shape.tokens_per_frame > target:
            return self._newest(cache, layer, target)
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
        return kernels.top_k(salient, seq, vision, target)

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

    def _score(self, cache: KVCache) -> list[LayerScores]:
        """Every layer in one call, so that keys and values are read once and by all threads."""
        vision = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
        recent = [self._recent(cache, layer, among) for layer, among in enumerate(vision)]
        scores = kernels.infinipot_scores(cache, recent, vision, rotated=self.keys == "rotated")
        return [LayerScores(seen, new, *score) for seen, new, score in zip(vision, recent, scores, strict=True)]

    def _recent(self, cache: KVCache, layer: int, vision: Bool) -> Bool:
        """Rows of the r newest frames, or as many of the newest rows where frames enter with what changed alone."""
        if self.shape.thinned:
            return newest(cache.seq(layer), vision, self.recent_frames * self.shape.tokens_per_frame)
        return kernels.newest_frames(cache.frame(layer), vision, self.recent_frames)

    def _per_head(self, score: Float32) -> Float32:
        """Scores ``[kv_heads, n]`` as they are, or averaged so that all heads of the layer choose alike."""
        if self.heads == "own":
            return score
        return np.broadcast_to(score.mean(0, dtype=np.float64).astype(np.float32), score.shape)

    def _preset(self, layer: int) -> int:
        return WINDOWS[4 * layer // self.shape.layers]

    def _window(self, layer: int, norms: Float32) -> int:
        """The pooling window of a layer: Alg. 2, lines 16 to 21, or the preset by depth."""
        if not self.thresholds:
            return self._preset(layer)
        return WINDOWS[int(np.searchsorted(self.thresholds, variation(norms), side="right"))]


def frame_means(score: Float32, frame: NDArray[np.int32], among: Bool) -> Float32:
    """Per head, the mean score of each row's frame over the rows of ``among``: float32 ``[kv_heads, n]``, 0 elsewhere."""
    means = np.zeros_like(score)
    for head, rows in enumerate(among):
        _, place = np.unique(frame[head, rows], return_inverse=True)
        means[head, rows] = (np.bincount(place, score[head, rows]) / np.bincount(place))[place]
    return means


def recent_fraction(text: str) -> float:
    """Raises ValueError for what is no number from 0 to 1."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction <= 1:
        raise ValueError(f"recent is a number from 0 to 1, not {text}")
    return fraction


def variation(norms: Float32) -> float:
    """The coefficient of variation, sigma / mu, of value norms (Alg. 2, line 18); all heads of a layer together."""
    return float(np.std(norms, dtype=np.float64) / max(float(np.mean(norms, dtype=np.float64)), 1e-30))


def official_distinctness(key: Float64, past: int, per_frame: int) -> Float64:
    """Eq. 4 on pseudo-frames: minus the mean cosine with the recent keys of the same patch, ``[H, past]``.

    key: rotated, oldest first, ``[H, n, D]``, the first ``past`` of them old.
    """
    unit = key / (np.linalg.norm(key, axis=-1, keepdims=True) + 1e-9)
    frames = unit.reshape(len(key), -1, per_frame, key.shape[-1])
    old, new = frames[:, : past // per_frame], frames[:, past // per_frame :]
    similarity: Float64 = np.einsum("hfpd,hpd->hfp", old, new.mean(1))
    return -similarity.reshape(len(key), past)


def official_pooling(norms: Float64, revision: str, quarter: int, per_frame: int, rows: int) -> Float64:
    """VaN of the authors' program, ``[H, n]``: value norms averaged over a window, zeros outside, by quarter of the depth.

    The first quarter's is 7 patches wide, at head in time as well; the second's 5; the third's is 3 tokens in a row. At head
    the first two are no larger than the frames held or than a side of the grid.
    """
    if quarter == 3:
        return norms
    if quarter == 2:
        return zero_padded_mean(norms, (3,))
    grid = norms.reshape(len(norms), -1, rows, per_frame // rows)
    size = WINDOWS[quarter]
    if revision == "head-pooled":
        size = min(size, *grid.shape[1:])
        size -= size % 2 == 0
    over_time = revision == "head-pooled" and quarter == 0
    return zero_padded_mean(grid, (size if over_time else 1, size, size)).reshape(norms.shape)


def zero_padded_mean(values: Float64, window: tuple[int, ...]) -> Float64:
    """Means over a ``window`` of odd sizes along the last axes, zeros beyond the edges; of the shape of ``values``."""
    for axis, size in zip(range(-len(window), 0), window, strict=True):
        pad = [(0, 0)] * values.ndim
        pad[axis] = (size // 2, size // 2)
        values = sliding_window_view(np.pad(values, pad), size, axis).mean(-1)
    return values

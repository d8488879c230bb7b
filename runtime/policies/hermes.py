"""HERMES: the cache as a hierarchy of memories, by layer. arXiv 2601.14724, eqs. 1 to 6, Apps. C, D and G."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, Rows
from edgevlm.runtime.policies.attention import Float64, Int64
from edgevlm.runtime.policies.base import (
    Bool,
    Context,
    FixedTarget,
    Float32,
    Guidance,
    Needs,
    NewRows,
    StreamShape,
    counted,
    setting,
    tokens_of,
)  # fmt: skip
from edgevlm.runtime.stateful import State

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

GLOBAL = "Summarize the video narrative, identifying main characters, key events, timeline changes, and the overall theme."
LOCAL = "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and spatial relationships."
DEPTHS = 0.1, 0.7  # of the paper: where shallow layers end and deep ones begin, as fractions of the depth
LAMBDAS = 0.1, 0.3, 0.4  # fractions of a score that come from the layer above: shallow, middle, deep


@dataclass
class Hermes(FixedTarget):
    """Shallow layers keep what is recent, deep layers what a guidance prompt attends to, middle layers a blend of both.

    Ours: compression precedes an append; guidance is one causal forward, rolled back; dt is a fraction of the largest rank;
    layers are joined by seq and take from the smoothed layer above; the summary is one row for the entire stream, a running
    mean at the position of the newest evicted token, never evicted.
    """

    target: float = setting(1.0, "|C| / |M|; below 1 the guidance forward runs less often", above=0, at_most=1)
    summary: bool = setting(True, "a deep layer keeps one token for everything it evicted")

    name: ClassVar[str] = "hermes"
    paper: ClassVar[str] = "HERMES, arXiv 2601.14724"
    state_fields = ("_merged",)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        measured = shape.calibration
        depths = (measured.middle_from, measured.deep_from) if measured else [tokens_of(of, shape.layers) for of in DEPTHS]
        self._middle_from, self._deep_from = depths
        self._k, self._omega = (tuple(map(float, text.split("/"))) for text in shape.fading)
        self._merged = np.zeros(shape.layers, np.int64)  # tokens that each layer's summary stands for

    def restore(self, state: State) -> None:
        """Restore a snapshot, of an earlier version too, which held the last turn."""
        super().restore({name: array for name, array in state.items() if name != "last_turn"})

    @property
    def basis(self) -> str:
        depths = f"middle from layer {self._middle_from}, deep from {self._deep_from}"
        if self.shape.calibration is not None:
            return f"calibrated {self.shape.calibration.described}: {depths}"
        return f"default depths, {depths}, as the model's layers were not measured (edgevlm calibrate)"

    def kind_of(self, layer: int) -> int:
        """0 for a shallow layer, 1 for a middle one, 2 for a deep one."""
        return int(layer >= self._middle_from) + int(layer >= self._deep_from)

    @property
    def needs(self) -> Needs:
        layers = tuple(range(self._middle_from, self.shape.layers))
        return Needs(guidance=(GLOBAL, f" {LOCAL}") if layers else (), guidance_layers=layers)

    @property
    def max_append(self) -> int:
        """A quarter of |M| at least, so that one guidance forward serves several frames."""
        return max(self.budget // 4, self.budget - self.compress_to, self.shape.tokens_per_frame)

    def summaries(self, cache: KVCache, keep: Mapping[int, Bool], rows: int) -> dict[int, NewRows]:
        add = {}
        for layer in (layer for layer in keep if self.summary and self.kind_of(layer) == 2):
            if int(keep[layer][0].sum()) - self.shape.prefix + 1 + rows > self.budget:
                self._merged[layer] = 0  # a budget that the coming rows fill has no room for a summary
            else:
                add[layer] = self.summarise(cache, layer, keep[layer][0])
        return add

    def summarise(self, cache: KVCache, layer: int, keep: Bool) -> NewRows:
        """Return the row that stands for the rows of a layer not in ``keep``, its former summary among them."""
        kind = cache.kind(layer)[0]
        gone, weight = ~keep & counted(kind), np.where(kind == Kind.SUMMARY, float(self._merged[layer]), 1.0)
        self._merged[layer] = int(weight[gone].sum())
        return summary_of(cache, layer, gone, weight)

    def competing(self, cache: KVCache, layer: int) -> Bool:
        """The rows that compete, ``[n]``, the same in all heads."""
        return np.asarray(cache.kind(layer)[0] == Kind.VISION)

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        guidance = context.guide() if self.needs.guidance else None
        among = [self.competing(cache, layer) for layer in range(self.shape.layers)]
        scores = [self.score_rows(cache, layer, rows, guidance) for layer, rows in enumerate(among)]
        scores = self.smooth(cache, among, scores)
        kept = {}
        for layer, target in targets.items():  # the same rows in all heads; one fewer where a summary takes a place
            count = max(0, target - 1) if self.summary and self.kind_of(layer) == 2 else target
            placed = np.zeros((1, len(among[layer])), np.float32)
            placed[0, among[layer]] = scores[layer]
            best = kernels.top_k(placed, cache.seq(layer)[:1], among[layer][None], count)
            kept[layer] = np.repeat(best, cache.kv_heads, 0)
        return kept

    def smooth(self, cache: KVCache, among: Sequence[Bool], scores: Sequence[Float64]) -> list[Float64]:
        """Eq. 5 from the deepest layer up: a token takes a fraction of its score from the layer above, if that holds it."""
        done, seqs = list(scores), [cache.seq(layer)[:1, rows] for layer, rows in enumerate(among)]
        for layer in range(len(done) - 2, -1, -1):
            above, weight = done[layer + 1], LAMBDAS[self.kind_of(layer)]
            if len(above):
                place = kernels.index_of(seqs[layer], seqs[layer + 1])[0]
                done[layer] = np.where(place >= 0, (1 - weight) * done[layer] + weight * above[place], done[layer])
        return done

    def score_rows(self, cache: KVCache, layer: int, among: Bool, guidance: Guidance | None) -> Float64:
        """Eqs. 1 to 4: raw importance of the rows ``among`` of a layer."""
        depth, seq = self.kind_of(layer), cache.seq(layer)
        k, omega = self.fading(layer)
        if depth == 0 or guidance is None:
            return normalised(recency(seq[0, among], k))
        rows = slice(0, guidance.rows[0] if depth == 2 else sum(guidance.rows))
        keys, queries = guidance.keys[layer][:, rows], guidance.queries[layer][:, rows]
        held = cache.key(layer), seq, cache.key_scale(layer)
        attended = normalised(guidance_attention(queries, keys, *held)[among])
        return attended if depth == 2 else (1 - omega) * attended + omega * normalised(recency(seq[0, among], k))

    def fading(self, layer: int) -> tuple[float, float]:
        """The layer's k and omega, which fall over the middle layers (App. D)."""
        middle = self._deep_from - self._middle_from
        x = (layer - self._middle_from) / middle if self.kind_of(layer) == 1 else 0.0
        return self._k[0] - self._k[1] * x, self._omega[0] - self._omega[1] * x


def normalised(score: Float64, added: float = 0.0) -> Float64:
    """Min-max over one layer's tokens, ``added`` to the range; 0 where all are equal or one is not a number."""
    low, high = score.min(initial=np.inf), score.max(initial=-np.inf)
    return (score - low) / (high - low + added) if high > low else np.zeros_like(score)


def recency(order: Int64, k: float) -> Float64:
    """Eq. 1: ``exp(-k dt)``, dt the rank from the newest as a fraction of the largest; ``order``: larger is newer."""
    age = np.empty(len(order))
    age[np.argsort(order, kind="stable")] = np.arange(len(order))[::-1]  # quickest for what is nearly sorted
    return np.exp(-k * age / max(len(order) - 1, 1))


def guidance_attention(
    queries: Float32,
    own_keys: Float32,
    key: NDArray[np.number],
    seq: Int64,
    scale: Float32 | None = None,
    *,
    causal: bool = True,
) -> Float64:
    """Eq. 2: the attention weight of each row of a layer, averaged over heads and guidance rows, ``[n]``.

    queries, own_keys: of the guidance rows, ``[heads or kv_heads, m, head_dim]``; each sees the keys up to its own, or all of
    them unless ``causal``. key, seq, scale: the layer's, as stored.
    """
    positions = seq.max(initial=-1) + 1 + np.arange(own_keys.shape[1]) * causal
    mass = kernels.attention_mass(queries, positions, key, seq, own_keys, positions, scale)
    return mass.sum(0, dtype=np.float64) / (queries.shape[0] * queries.shape[1])


def summary_of(cache: KVCache, layer: int, gone: Bool, weight: Float64, position: int | None = None) -> NewRows:
    """One row that stands for the rows ``gone`` ``[n]`` of a layer whose heads hold the same tokens, by ``weight`` ``[n]``.

    It takes the place of the newest of them in the stream: key = weighted mean of their keys rotated to its position on every
    axis (or to ``position`` on all of them), value = weighted mean of their values (App. G; eqs. 10 and 13). Raises CacheError
    for a cache that does not say which axis a rotary pair turns by.
    """
    if cache.axes > 1 and cache.pair_axis is None:
        raise CacheError(f"a summary turns keys, and this cache of {cache.axes} position axes has no sections: use summary=off")
    seq, at = cache.seq(layer)[0], cache.position(layer)[0].astype(np.int64)
    newest = int(np.argmax(np.where(gone, seq, -1)))
    target = at[newest] if position is None else np.full(cache.axes, position)
    pair_axis = np.zeros(len(cache.inv_freq), np.uint8) if cache.pair_axis is None else cache.pair_axis
    turns = (target - at[gone])[:, pair_axis] * (cache.inv_freq / (2 * np.pi))
    angle = (2 * np.pi * (turns - np.rint(turns))).astype(np.float32)  # of a small one, quicker and as exact
    first, second = np.split(cache.dequantize("key", layer, gone), 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    aligned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    none = np.zeros(1, np.int16)
    rows = Rows(
        np.array([Kind.SUMMARY], np.uint8), seq[[newest]].astype(np.int64), np.array([-1], np.int32), none, none.copy(),
        target[None].astype(np.int32),
    )  # fmt: skip
    share, parts = weight[gone] / weight[gone].sum(), (aligned, cache.dequantize("value", layer, gone))
    key, value = (np.einsum("n,hnd->hd", share, part)[:, None].astype(np.float32) for part in parts)
    return NewRows(key, value, rows)

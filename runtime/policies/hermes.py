"""The policy HERMES treats the layers' caches as a hierarchy of memories (arXiv 2601.14724, eqs. 1 to 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, Rows
from edgevlm.runtime.policies.attention import Float64, Int64
from edgevlm.runtime.policies.base import FixedTarget, Needs, StreamShape, setting, tokens_of, without_lone_text
from edgevlm.runtime.policies.layer import Bool, Layer, NewRows
from edgevlm.runtime.stateful import State

GLOBAL = "Summarize the video narrative, identifying main characters, key events, timeline changes, and the overall theme."
LOCAL = "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and spatial relationships."
DEPTHS = 0.1, 0.7
LAMBDAS = 0.1, 0.3, 0.4  # fraction of a score taken from the next deeper layer, in shallow, middle and deep layers


@dataclass
class Hermes(FixedTarget):
    """Keep recent tokens in shallow layers, tokens important to a guidance prompt in deep layers, and both in middle layers.

    Ours: the cache is compressed before new frames are appended. The guidance prompt runs in one causal forward pass, which is
    rolled back. In eq. 1, dt is a token's rank by age, divided by the largest rank. Tokens are matched across layers by their
    ``seq``. Smoothing starts at the deepest layer; each other layer uses the smoothed scores of the next deeper one. A deep
    layer's summary is one row, a running mean that is never evicted.
    """

    target: float = setting(
        1.0, "fraction of |M| that a compression keeps; below 1, the guidance pass runs less often", above=0, at_most=1
    )
    summary: bool = setting(True, "keep a summary of all evicted tokens in each deep layer")

    name: ClassVar[str] = "hermes"
    paper: ClassVar[str] = "HERMES, arXiv 2601.14724"
    state_fields = ("_merged",)

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        measured = shape.calibration
        depths = (measured.middle_from, measured.deep_from) if measured else [tokens_of(of, shape.layers) for of in DEPTHS]
        self._middle_from, self._deep_from = depths
        self._k, self._omega = (tuple(map(float, text.split("/"))) for text in shape.fading)
        self._merged = np.zeros(shape.layers, np.int64)  # the number of tokens that each layer's summary represents

    def restore(self, state: State) -> None:
        """Restore a snapshot, ignoring ``last_turn``, which only snapshots of early versions hold."""
        super().restore({name: array for name, array in state.items() if name != "last_turn"})

    @property
    def basis(self) -> str:
        depths = f"middle from layer {self._middle_from}, deep from {self._deep_from}"
        if self.shape.calibration is not None:
            return f"calibrated {self.shape.calibration.described}: {depths}"
        return f"default depths, {depths}, as the model's layers were not measured (edgevlm calibrate)"

    def kind_of(self, layer: int) -> int:
        """Return 0 for a shallow, 1 for a middle and 2 for a deep layer."""
        return int(layer >= self._middle_from) + int(layer >= self._deep_from)

    @property
    def needs(self) -> Needs:
        layers = tuple(range(self._middle_from, self.shape.layers))
        return Needs(guidance=(GLOBAL, f" {LOCAL}") if layers else (), guidance_layers=layers)

    @property
    def max_append(self) -> int:
        """The largest number of rows to append at once.

        It is at least |M| / 4, so that one guidance pass serves several frames.
        """
        return max(self.budget // 4, self.budget - self.compress_to, self.shape.tokens_per_frame)

    def prepare(self, layers: Sequence[Layer]) -> list[Float64]:
        """Return each layer's smoothed scores of the rows that compete to stay."""
        return self.smooth(layers, [self.score_rows(layer) for layer in layers])

    def compress(self, layer: Layer) -> None:
        """Keep the same rows in all heads. Deep layers leave one row free for the summary."""
        among, deep = self.competing(layer), self.summary and self.kind_of(layer.index) == 2
        placed = np.zeros((1, len(among)), np.float32)
        placed[0, among] = layer.prepared[layer.index]
        best = kernels.top_k(placed, layer.seq[:1], among[None], max(0, layer.target - deep))
        keep = np.repeat(best, len(layer.seq), 0)
        layer.keep(keep)
        stays = keep | layer.fixed
        if deep and int(without_lone_text(layer, stays)[0].sum()) - self.shape.prefix + 1 + layer.coming <= self.budget:
            layer.add(self.summarise(layer, stays[0]))
        elif deep:
            self._merged[layer.index] = 0  # if the next rows fill the budget, there is no room for a summary

    def summarise(self, layer: Layer, keep: Bool) -> NewRows:
        """Return one row that summarises all evicted rows and the old summary. ``keep``: a mask of the rows that stay."""
        weight = np.where(layer.kind[0] == Kind.SUMMARY, float(self._merged[layer.index]), 1.0)
        self._merged[layer.index] = int(weight[~keep].sum())
        return summary_of(layer, ~keep, weight)

    def competing(self, layer: Layer) -> Bool:
        """Return a mask of the rows that compete to stay, ``[n]``, the same in all heads."""
        return np.asarray(layer.kind[0] == Kind.VISION)

    def smooth(self, layers: Sequence[Layer], scores: Sequence[Float64]) -> list[Float64]:
        """Mix each token's score with its score in the next deeper layer (eq. 5), if that layer holds the token."""
        done, seqs = list(scores), [layer.seq[:1, self.competing(layer)] for layer in layers]
        for layer in range(len(done) - 2, -1, -1):
            above, weight = done[layer + 1], LAMBDAS[self.kind_of(layer)]
            if len(above):
                place = kernels.index_of(seqs[layer], seqs[layer + 1])[0]
                done[layer] = np.where(place >= 0, (1 - weight) * done[layer] + weight * above[place], done[layer])
        return done

    def score_rows(self, layer: Layer) -> Float64:
        """Return the scores of the rows that compete to stay, before smoothing (eqs. 1 to 4). Attention is summed over queries,
        not averaged.
        """
        depth, among = self.kind_of(layer.index), self.competing(layer)
        k, omega = self.fading(layer.index)
        if depth == 0:
            return normalised(recency(layer.seq[0, among], k))
        texts = self.needs.guidance[: 1 if depth == 2 else None]
        attended = normalised(layer.attention_of(*texts).sum(0, dtype=np.float64)[among])
        return attended if depth == 2 else (1 - omega) * attended + omega * normalised(recency(layer.seq[0, among], k))

    def fading(self, layer: int) -> tuple[float, float]:
        """Return a layer's decay k and recency weight omega, which decrease over the middle layers (appendix D)."""
        middle = self._deep_from - self._middle_from
        x = (layer - self._middle_from) / middle if self.kind_of(layer) == 1 else 0.0
        return self._k[0] - self._k[1] * x, self._omega[0] - self._omega[1] * x


def normalised(score: Float64, added: float = 0.0) -> Float64:
    """Subtract the minimum, and divide by the range plus ``added``. Returns zeros if all scores are equal or one is NaN."""
    low, high = score.min(initial=np.inf), score.max(initial=-np.inf)
    return (score - low) / (high - low + added) if high > low else np.zeros_like(score)


def recency(order: Int64, k: float) -> Float64:
    """Return ``exp(-k dt)``, as in eq. 1. Here dt is a row's rank by age, divided by the largest rank.

    ``order``: a number for each row, larger for newer rows.
    """
    age = np.empty(len(order))
    age[np.argsort(order, kind="stable")] = np.arange(len(order))[::-1]  # the fastest sort for nearly sorted input
    return np.exp(-k * age / max(len(order) - 1, 1))


def summary_of(layer: Layer, gone: Bool, weight: Float64, position: int | None = None) -> NewRows:
    """Return one row that replaces several rows of a layer. All heads must hold the same tokens.

    ``gone``: a mask of the replaced rows, ``[n]``. ``weight``: each row's weight, ``[n]``. The new row has the ``seq`` of the
    newest replaced row, and also its position unless ``position`` is set. The new key and value are weighted means (eqs. 10 and
    13). Keys are first rotated to the new position. Raises CacheError if the cache has several axes and no ``pair_axis``.
    """
    cache = layer.cache
    if cache.axes > 1 and cache.pair_axis is None:
        raise CacheError(f"a summary requires rotary sections in a cache with {cache.axes} position axes; use summary=off")
    seq, at = layer.seq[0], cache.position(layer.index)[0].astype(np.int64)
    newest = int(np.argmax(np.where(gone, seq, -1)))
    target = at[newest] if position is None else np.full(cache.axes, position)
    pair_axis = np.zeros(cache.head_dim // 2, np.uint8) if cache.pair_axis is None else cache.pair_axis
    turns = (target - at[gone])[:, pair_axis] * (cache.frequencies(layer.index) / (2 * np.pi))
    angle = (2 * np.pi * (turns - np.rint(turns))).astype(np.float32)  # cosines of small angles are faster, and as exact
    first, second = np.split(cache.dequantize("key", layer.index, gone), 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    aligned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    none = np.zeros(1, np.int16)
    rows = Rows(
        np.array([Kind.SUMMARY], np.uint8), seq[[newest]].astype(np.int64), np.array([-1], np.int32), none, none.copy(),
        target[None].astype(np.int32),
    )  # fmt: skip
    share, parts = weight[gone] / weight[gone].sum(), (aligned, cache.dequantize("value", layer.index, gone))
    key, value = (np.einsum("n,hnd->hd", share, part)[:, None].astype(np.float32) for part in parts)
    return NewRows(key, value, rows)

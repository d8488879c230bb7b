"""HERMES: the cache as a hierarchy of memories, by layer. arXiv 2601.14724, eqs. 1 to 6, Apps. C, D and G."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, Rows
from edgevlm.runtime.policies.base import (
    Bool,
    Context,
    Float32,
    Guidance,
    Needs,
    NewRows,
    Policy,
    StreamShape,
    counted,
    setting,
    tokens_of,
)  # fmt: skip

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache
    from edgevlm.runtime.calibration import Calibration

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

GLOBAL = "Summarize the video narrative, identifying main characters, key events, timeline changes, and the overall theme."
LOCAL = "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and spatial relationships."
SHALLOW, DEEP = "0.1", "0.7"  # of the paper


@dataclass
class Hermes(Policy):
    """Shallow layers keep what is recent, deep layers what a guidance prompt attends to, middle layers a blend of both.

    Ours: compression precedes an append; guidance is one causal forward, rolled back; layers are joined by seq; the summary is
    one row for the entire stream, a running mean at the position of the newest evicted token, never evicted.
    """

    target: float = setting(1.0, "|C| / |M|; below 1 the guidance forward runs less often", above=0, at_most=1)
    shallow: str = setting(
        "",
        "fraction of the depth where shallow layers end; shallow and deep empty: calibrated, else 0.1 and 0.7; one empty: its "
        "default",
    )
    deep: str = setting("", "fraction of the depth where deep layers begin")
    k: str = setting("", "forgetting rate: value at the first middle layer / fall until the first deep one; empty: by family")
    omega: str = setting("", "fraction of recency in middle layers, like k; empty: by family")
    age: Literal["fraction", "rank"] = setting(
        "fraction", "dt of eq. 1: rank from the newest as a fraction of the largest, as the authors' program; rank: as printed"
    )
    smoothing: Literal["recursive", "raw", "off"] = setting(
        "recursive", "take a fraction of each layer's scores from the layer above, itself smoothed; raw: not, as eq. 5 has it"
    )
    lambdas: str = setting("0.1/0.3/0.4", "these fractions, shallow/middle/deep")
    join: Literal["seq", "rank"] = setting("seq", "join layers' tokens by seq, or by rank as the authors' program")
    summary: Literal["on", "off", "last"] = setting(
        "on",
        "a deep layer keeps one token for everything it evicted; last: as the authors' program, another at each compression, "
        "after the newest token and evictable",
    )
    layer_weights: str = setting("1/1/1", "weights of the layers' budgets, shallow/middle/deep")
    global_prompt: str = setting(GLOBAL, "guidance for all layers (App. C); if a prompt is empty, the other serves all layers")
    local_prompt: str = setting(LOCAL, "guidance that middle layers add")
    guidance_rows: int = setting(
        0, "score by this many rows of each guidance text, evenly spaced, its last among them; 0: by all", at_least=0
    )
    mode: Literal["streaming", "official"] = setting(
        "streaming",
        "official, as the authors' program: append, then compress, with memory for another chunk; re-index each time; prompts, "
        "with the last question and answer, are raw embeddings projected in each layer; join=rank, summary=last",
    )

    name: ClassVar[str] = "hermes"
    paper: ClassVar[str] = "HERMES, arXiv 2601.14724"
    state_fields = ("_merged", "_last_turn")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "official":
            self.join, self.summary, self.guidance_rows = "rank", "off" if self.summary == "off" else "last", 0
        self._depths = _numbers(self.shallow or SHALLOW, 1, "shallow") + _numbers(self.deep or DEEP, 1, "deep")
        if not self._depths[0] <= self._depths[1] <= 1:
            raise ValueError("0 <= shallow <= deep <= 1")
        if not (self.global_prompt or self.local_prompt):
            raise ValueError("one of global_prompt and local_prompt must say something")
        self._lambdas = _numbers(self.lambdas, 3, "lambdas")
        self._weights = _numbers(self.layer_weights, 3, "layer_weights")
        if max(self._lambdas) > 1:
            raise ValueError("lambdas lie in 0..1")
        for name, text in (("k", self.k), ("omega", self.omega)):
            _numbers(text or "1/1", 2, name)
        if self.summary == "last" and self.join == "seq":
            raise ValueError("summary=last has no place in the stream's order; it goes with join=rank")

    def attach(self, budget: int, shape: StreamShape) -> None:
        super().attach(budget, shape)
        if self._calibrated is not None:
            self._middle_from, self._deep_from = self._calibrated.middle_from, self._calibrated.deep_from
        else:
            self._middle_from, self._deep_from = (tokens_of(depth, shape.layers) for depth in self._depths)
        k, omega = shape.fading
        self._k, self._omega = _numbers(self.k or k, 2, "k"), _numbers(self.omega or omega, 2, "omega")
        self._budgets = _layer_budgets(budget, [self._weights[self._class(layer)] for layer in range(shape.layers)])
        self._merged = np.zeros(shape.layers, np.int64)  # tokens that each layer's summary stands for
        self._last_turn = ""

    @property
    def _calibrated(self) -> Calibration | None:
        """The measurements that the depths come from, if they do."""
        return None if self.shallow or self.deep or self.mode == "official" else self.shape.calibration

    @property
    def basis(self) -> str:
        depths = f"middle from layer {self._middle_from}, deep from {self._deep_from}"
        if self._calibrated is not None:
            return f"calibrated {self._calibrated.described}: {depths}"
        if self.shallow or self.deep:
            return f"{depths}, as set"
        if self.mode == "official":
            return f"mode=official: {depths}"
        return f"default depths, {depths}, as the model's layers were not measured (edgevlm calibrate)"

    def _class(self, layer: int) -> int:
        """0 shallow, 1 middle, 2 deep."""
        return int(layer >= self._middle_from) + int(layer >= self._deep_from)

    @property
    def needs(self) -> Needs:
        texts = (self.global_prompt, " " * bool(self.global_prompt) + self.local_prompt)
        if self.mode == "official":
            texts = official_prompts(self.global_prompt, self.local_prompt, self._last_turn)
        layers = tuple(range(self._middle_from, self.shape.layers))
        guidance = tuple(filter(str.strip, texts)) if layers else ()
        if self.mode == "official":
            return Needs(guidance=guidance, raw_layers=layers)
        return Needs(guidance=guidance, guidance_layers=layers)

    @property
    def appends_first(self) -> bool:
        return self.mode == "official"

    def answered(self, question: str, answer: str) -> None:
        self._last_turn = f"Question: {question} Answer: {answer}"

    @property
    def layer_budgets(self) -> NDArray[np.int64]:
        return np.array(self._budgets, np.int64)

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)

    @property
    def max_append(self) -> int:
        """A quarter of the smallest layer at least, so that one guidance forward serves several frames."""
        quarter = min(self._budgets) // 4
        return max(quarter, self.budget - self.compress_to, self.shape.tokens_per_frame)

    def summaries(self, cache: KVCache, keep: Mapping[int, Bool], rows: int) -> dict[int, NewRows]:
        add = {}
        for layer in (layer for layer in keep if self.summary != "off" and self._class(layer) == 2):
            if int(keep[layer][0].sum()) - self.shape.prefix + 1 + rows > self._budgets[layer]:
                self._merged[layer] = 0  # a budget that the coming rows fill has no room for a summary
            else:
                add[layer] = self._summarise(cache, layer, keep[layer][0])
        return add

    def _summarise(self, cache: KVCache, layer: int, keep: Bool) -> NewRows:
        kind = cache.kind(layer)[0]
        gone = ~keep & counted(kind)
        if self.summary == "last":
            after = int(cache.position(layer)[0, keep].max(initial=-1)) + 1
            return summary_of(cache, layer, gone, np.ones(len(gone)), after)
        weight = np.where(kind == Kind.SUMMARY, float(self._merged[layer]), 1.0)
        self._merged[layer] = int(weight[gone].sum())
        return summary_of(cache, layer, gone, weight)

    def _tokens(self, cache: KVCache, layer: int) -> Bool:
        """The rows that compete, ``[n]``; the same in all heads."""
        kind = cache.kind(layer)[0]
        return (kind == Kind.VISION) | ((kind == Kind.SUMMARY) & (self.summary == "last"))

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> dict[int, Bool]:
        guidance = context.guide() if self.needs.guidance else None
        tokens = [self._tokens(cache, layer) for layer in range(self.shape.layers)]
        scores = [self._score(cache, layer, tokens[layer], guidance) for layer in range(self.shape.layers)]
        if self.smoothing != "off":
            orders = [self._order(cache, layer, among) for layer, among in enumerate(tokens)]
            weights = [self._lambdas[self._class(layer)] for layer in range(self.shape.layers)]
            scores = smoothed(scores, orders, weights, self.join == "rank", self.smoothing == "raw")
        return {layer: self._select(cache, layer, tokens[layer], scores[layer], target) for layer, target in targets.items()}

    def _select(self, cache: KVCache, layer: int, among: Bool, score: Float64, target: int) -> Bool:
        """The best rows ``among`` ``[n]``, the same in all heads; one fewer where a summary takes a place."""
        count = max(0, target - 1) if self.summary != "off" and self._class(layer) == 2 else target
        placed = np.zeros((1, len(among)), np.float32)
        placed[0, among] = score
        keep = kernels.top_k(placed, cache.seq(layer)[:1], among[None], count)
        return np.repeat(keep, cache.kv_heads, 0)

    def _order(self, cache: KVCache, layer: int, among: Bool) -> Int64:
        """What the rows ``among`` are joined by, ``[n]``: seq, or their rank in the layer by position, then by seq."""
        seq = cache.seq(layer)[0, among].astype(np.int64)
        if self.join == "seq":
            return seq
        place = np.empty_like(seq)
        place[np.lexsort((seq, cache.position(layer)[0, among, 0]))] = np.arange(len(seq))
        return place

    def _score(self, cache: KVCache, layer: int, among: Bool, guidance: Guidance | None) -> Float64:
        """Eqs. 1 to 4: raw importance of the rows ``among`` of a layer."""
        depth, seq = self._class(layer), cache.seq(layer)
        x = (layer - self._middle_from) / (self._deep_from - self._middle_from) if depth == 1 else 0.0
        official = self.mode == "official"
        added = 1e-6 if official else 0.0
        k = self._k[0] - self._k[1] * x
        if depth == 0 or guidance is None:
            return self._recent(seq[0, among], k, added)
        texts = guidance.rows[:1] if depth == 2 else guidance.rows[-1:] if official else guidance.rows
        first = sum(guidance.rows[:-1]) if official and depth == 1 else 0
        keys, rows = guidance.keys[layer][:, first : first + sum(texts)], spaced(texts, self.guidance_rows)
        held = cache.key(layer), seq, cache.key_scale(layer)
        queries = guidance.queries[layer][:, first + rows]
        attended = normalised(guidance_attention(queries, keys, *held, rows=rows, causal=not official)[among], added)
        if depth == 2:
            return attended
        omega = self._omega[0] - self._omega[1] * x
        return (1 - omega) * attended + omega * self._recent(seq[0, among], k, added)

    def _recent(self, seq: Int64, k: float, added: float) -> Float64:
        return normalised(recency(seq, k, 1 if self.age == "rank" else None), added)


def official_prompts(global_prompt: str, local_prompt: str, last_turn: str) -> tuple[str, str]:
    """App. C: the prompt of the deep layers and that of the middle ones, with the last turn of a conversation in both.

    The program's third, the local prompt alone, is for the shallow layers, which give its attention no weight.
    """
    if last_turn:
        global_prompt = global_prompt and f"Context summary: {last_turn}. {global_prompt}"
        local_prompt = local_prompt and f"Find recent details related to: {last_turn}. {local_prompt}"
    if not (global_prompt and local_prompt):
        return global_prompt, local_prompt
    return global_prompt, f"{local_prompt}; {global_prompt}"


def _layer_budgets(budget: int, weights: list[float]) -> list[int]:
    """Tab. 5: ``floor(w_i / sum w * budget * layers)``, the residue on the last layer; exact in the decimals given."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = budget * len(weights)
    if not any(exact):
        raise ValueError("layer_weights leave no layer a budget")
    parts = [int(weight * total / sum(exact)) for weight in exact]
    return [*parts[:-1], total - sum(parts[:-1])]


def _numbers(text: str, count: int, name: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split("/"))
    except ValueError:
        numbers = ()
    if len(numbers) != count or not all(0 <= number < np.inf for number in numbers):
        raise ValueError(f"{name} takes {count} number{'s' * (count > 1)} from 0 up, like {'/'.join(['1'] * count)}")
    return numbers


def normalised(score: Float64, added: float = 0.0) -> Float64:
    """Min-max over one layer's tokens, ``added`` to the range; 0 where all are equal or one is not a number."""
    low, high = score.min(initial=np.inf), score.max(initial=-np.inf)
    return (score - low) / (high - low + added) if high > low else np.zeros_like(score)


def recency(order: Int64, k: float, unit: int | None = None) -> Float64:
    """Eq. 1: ``exp(-k dt)``, dt the rank from the newest in ``unit`` ranks, by default the largest; order: larger is newer."""
    age = np.empty(len(order))
    age[np.argsort(order, kind="stable")] = np.arange(len(order))[::-1]  # of what is nearly sorted the quickest
    return np.exp(-k * age / (unit or max(len(order) - 1, 1)))


@lru_cache
def spaced(texts: tuple[int, ...], count: int) -> Int64:
    """Of texts of so many rows, one after the other, ``count`` rows of each, evenly spaced up to its last; 0: all."""
    starts = np.cumsum([0, *texts[:-1]])
    counts = [min(count or rows, rows) for rows in texts]
    parts = zip(starts, texts, counts, strict=True)
    return np.concatenate([start + np.arange(1, some + 1) * rows // max(some, 1) - 1 for start, rows, some in parts])


def guidance_attention(
    queries: Float32,
    own_keys: Float32,
    key: NDArray[np.number],
    seq: Int64,
    scale: Float32 | None = None,
    *,
    rows: Int64 | slice = slice(None),
    causal: bool = True,
) -> Float64:
    """Eq. 2: the attention weight of each row of a layer, averaged over heads and guidance rows, ``[n]``.

    own_keys: of all guidance rows, ``[kv_heads, m, head_dim]``; queries: of ``rows`` among them, ``[heads, rows, head_dim]``,
    each of which sees the keys up to its own, or all of them unless ``causal``; key: ``[kv_heads, n, head_dim]`` as stored,
    seq: ``[kv_heads, n]``; scale: of int8 keys.
    """
    positions = seq.max(initial=-1) + 1 + np.arange(own_keys.shape[1]) * causal
    mass = kernels.attention_mass(queries, positions[rows], key, seq, own_keys, positions, scale)
    return mass.sum(0, dtype=np.float64) / (queries.shape[0] * queries.shape[1])


def smoothed(
    scores: Sequence[Float64], orders: Sequence[Int64], weights: Sequence[float], by_rank: bool, raw: bool = False
) -> list[Float64]:
    """Eq. 5 from the deepest layer up: each layer takes its weight's fraction of the layer above it, smoothed unless ``raw``.

    Tokens meet by ``orders`` (their seq); one that the layer above does not hold stays as it is. ``by_rank``: the n-th token
    meets the n-th, and layers of unequal length by linear interpolation, as the authors' program does.
    """
    done = list(scores)
    for layer in range(len(scores) - 2, -1, -1):
        own, above, weight = scores[layer].copy(), (scores if raw else done)[layer + 1], weights[layer]
        if by_rank and len(above):
            here, there = np.argsort(orders[layer]), np.argsort(orders[layer + 1])
            place = (np.arange(len(own)) + 0.5) * len(above) / max(len(own), 1) - 0.5
            own[here] = (1 - weight) * own[here] + weight * np.interp(place, np.arange(len(above)), above[there])
        elif not by_rank:
            place = kernels.index_of(orders[layer][None], orders[layer + 1][None])[0]
            if len(above):
                own = np.where(place >= 0, (1 - weight) * own + weight * above[place], own)
        done[layer] = own
    return done


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
    normalised = weight[gone] / weight[gone].sum()
    pair_axis = np.zeros(len(cache.inv_freq), np.uint8) if cache.pair_axis is None else cache.pair_axis
    turns = (target - at[gone])[:, pair_axis] * (cache.inv_freq / (2 * np.pi))
    angle = (2 * np.pi * (turns - np.rint(turns))).astype(np.float32)  # of a small one, quicker and as exact
    first, second = np.split(cache.dequantize("key", layer, gone), 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    aligned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    rows = Rows(
        kind=np.array([Kind.SUMMARY], np.uint8),
        seq=seq[[newest]].astype(np.int64),
        frame=np.array([-1], np.int32),
        row=np.zeros(1, np.int16),
        col=np.zeros(1, np.int16),
        position=target[None].astype(np.int32),
    )
    value = cache.dequantize("value", layer, gone)
    mean = [np.einsum("n,hnd->hd", normalised, part)[:, None].astype(np.float32) for part in (aligned, value)]
    return NewRows(mean[0], mean[1], rows)

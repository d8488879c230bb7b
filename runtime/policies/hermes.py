"""HERMES: the cache as a hierarchy of memories, by layer. arXiv 2601.14724, eqs. 1 to 6, Apps. C, D and G."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import kernels
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies.base import Bool, Guidance, Guide, Needs, NewRows, Plan, Policy, StreamShape, tokens_of
from edgevlm.runtime.policies.hermes_scores import Float64, Int64, guidance_attention, normalised, recency, smoothed, summary_of

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache
    from edgevlm.runtime.calibration import Calibration

GLOBAL = "Summarize the video narrative, identifying main characters, key events, timeline changes, and the overall theme."
LOCAL = "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and spatial relationships."
SHALLOW, DEEP = "0.1", "0.7"  # of the paper


@dataclass
class Hermes(Policy):
    """Shallow layers keep what is recent, deep layers what a guidance prompt attends to, middle layers a blend of both.

    target: |C| / |M|; below 1 the guidance forward runs less often. shallow, deep: the depths, as shares, at which the shallow
    layers end and the deep ones begin; both empty: those measured for the model if it was calibrated, else 0.1 and 0.7; one of
    them empty: that one's preset. k, omega: forgetting rate and share of recency, as value at the first middle layer /
    fall until the first deep one; empty: the family's own. smoothing: take a share of each layer's scores from the layer
    above; lambdas: those shares, shallow/middle/deep; join: tokens of two layers meet by ``seq`` or (as the authors' program
    does) by rank. summary: a deep layer keeps one token that stands for all it evicted; ``last``: as the authors' program
    does, a new one each time, after the newest token, evictable. layer_weights: shares of the budget, shallow/middle/deep.
    global_prompt, local_prompt: the guidance (App. C); with one of them empty the other serves all layers. mode: ``official``
    does as the authors' program: append, then compress, in an arena with a chunk more, and re-index each time; the prompts,
    with the last question and answer in them, are raw embeddings projected in each layer; join=rank and summary=last.

    Ours: room is made before rows come; the guidance is one causal forward, rolled back; tokens of two layers meet by seq; the
    summary is one row for the whole stream, a running mean at the place of the newest evicted token, never evicted.
    """

    target: float = 1.0
    shallow: str = ""
    deep: str = ""
    k: str = ""
    omega: str = ""
    smoothing: bool = True
    lambdas: str = "0.1/0.3/0.4"
    join: Literal["seq", "rank"] = "seq"
    summary: Literal["on", "off", "last"] = "on"
    layer_weights: str = "1/1/1"
    global_prompt: str = GLOBAL
    local_prompt: str = LOCAL
    mode: Literal["streaming", "official"] = "streaming"

    name: ClassVar[str] = "hermes"
    paper: ClassVar[str] = "HERMES, arXiv 2601.14724"
    state_fields = ("_merged", "_last_turn")

    def __post_init__(self) -> None:
        if self.mode == "official":
            self.join, self.summary = "rank", "off" if self.summary == "off" else "last"
        self._depths = _numbers(self.shallow or SHALLOW, 1, "shallow") + _numbers(self.deep or DEEP, 1, "deep")
        if not (0 < self.target <= 1 and self._depths[0] <= self._depths[1] <= 1):
            raise ValueError("target lies in (0, 1], and 0 <= shallow <= deep <= 1")
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
            self._middle_from, self._deep_from = (tokens_of(share, shape.layers) for share in self._depths)
        k, omega = shape.fading
        self._k, self._omega = _numbers(self.k or k, 2, "k"), _numbers(self.omega or omega, 2, "omega")
        self._budgets = _shares(budget, [self._weights[self._class(layer)] for layer in range(shape.layers)])
        self._merged = np.zeros(shape.layers, np.int64)  # tokens that each layer's summary stands for
        self._scores: list[Float64] = []
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
            return f"presets of mode=official, {depths}"
        return f"presets, {depths}; this model is not calibrated (edgevlm calibrate)"

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
        return self._budgets

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)

    @property
    def room(self) -> int:
        """A quarter of the smallest layer at least, so that one guidance forward serves several frames."""
        quarter = int(self._budgets.min()) // 4
        return max(quarter, self.budget - self.compress_to, self.shape.tokens_per_frame)

    def before_append(self, cache: KVCache, rows: int, guide: Guide) -> Plan | None:
        plan = super().before_append(cache, rows, guide)
        if plan is None or self.summary == "off":
            return plan
        add = {}
        for layer in range(self._deep_from, self.shape.layers):
            keep = plan.keep[layer]
            if keep is None:
                continue
            if int(keep[0].sum()) - self.shape.prefix + 1 + rows > self._budgets[layer]:
                self._merged[layer] = 0  # a budget that the coming rows fill has no room for a summary
            else:
                add[layer] = self._summarise(cache, layer, keep[0])
        return Plan(plan.keep, add)

    def _summarise(self, cache: KVCache, layer: int, keep: Bool) -> NewRows:
        kind = cache.kind(layer)[0]
        gone = ~keep & np.isin(kind, (Kind.VISION, Kind.SUMMARY))
        if self.summary == "last":
            after = int(cache.position(layer)[0, keep].max(initial=-1)) + 1
            return summary_of(cache, layer, gone, np.ones(len(gone)), after)
        weight = np.where(kind == Kind.SUMMARY, float(self._merged[layer]), 1.0)
        self._merged[layer] = int(weight[gone].sum())
        return summary_of(cache, layer, gone, weight)

    def _tokens(self, cache: KVCache, layer: int) -> Bool:
        """The rows that compete for a place, ``[n]``; the same in all heads, which choose alike."""
        kind = cache.kind(layer)[0]
        return (kind == Kind.VISION) | ((kind == Kind.SUMMARY) & (self.summary == "last"))

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        guidance = guide() if self.needs.guidance else None
        tokens = [self._tokens(cache, layer) for layer in range(self.shape.layers)]
        scores = [self._score(cache, layer, tokens[layer], guidance) for layer in range(self.shape.layers)]
        if self.smoothing:
            orders = [self._order(cache, layer, among) for layer, among in enumerate(tokens)]
            weights = [self._lambdas[self._class(layer)] for layer in range(self.shape.layers)]
            scores = smoothed(scores, orders, weights, self.join == "rank")
        self._scores = [np.zeros(len(among)) for among in tokens]
        for placed, among, score in zip(self._scores, tokens, scores, strict=True):
            placed[among] = score

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
        recent = normalised(recency(seq[0, among], self._k[0] - self._k[1] * x), added)
        if depth == 0 or guidance is None:
            return recent
        end = guidance.rows[0] if depth == 2 else sum(guidance.rows)
        rows = slice(end - guidance.rows[-1] if official and depth == 1 else 0, end)
        queries, keys = guidance.queries[layer][:, rows], guidance.keys[layer][:, rows]
        held = cache.key(layer), seq, cache.key_scale(layer)
        attended = normalised(guidance_attention(queries, keys, *held, causal=not official)[among], added)
        if depth == 2:
            return attended
        omega = self._omega[0] - self._omega[1] * x
        return (1 - omega) * attended + omega * recent

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        count = max(0, target - 1) if self.summary != "off" and self._class(layer) == 2 else target
        kind, seq, score = cache.kind(layer)[:1], cache.seq(layer)[:1], self._scores[layer].astype(np.float32)[None]
        keep = (kind == Kind.PREFIX) | kernels.top_k(score, seq, self._tokens(cache, layer)[None], count)
        return np.repeat(keep, cache.kv_heads, 0)


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


def _shares(budget: int, weights: list[float]) -> NDArray[np.int64]:
    """Tab. 5: ``floor(w_i / sum w * budget * layers)``, the residue on the last layer; exact in the decimals given."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = budget * len(weights)
    if not any(exact):
        raise ValueError("layer_weights leave no layer a budget")
    shares = np.array([int(weight * total / sum(exact)) for weight in exact], np.int64)
    shares[-1] += total - shares.sum()
    return shares


def _numbers(text: str, count: int, name: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split("/"))
    except ValueError:
        numbers = ()
    if len(numbers) != count or not all(0 <= number < np.inf for number in numbers):
        raise ValueError(f"{name} takes {count} number{'s' * (count > 1)} from 0 up, like {'/'.join(['1'] * count)}")
    return numbers

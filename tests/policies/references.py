"""The reference of each policy, by the text that makes the policy."""

import numpy as np
import reference
from policies import reference_attention, reference_baselines, reference_infinipot_v
from policies.filled import HEADS, INV_FREQ
from policies.reference_attention import PureKV
from policies.reference_infinipot_v import NearTieError, best, cosine, unrotated
from policies.reference_last_seen import LastSeen

from edgevlm.runtime.cache import Kind

BOTH = (Kind.PREFIX, Kind.VISION)


def vision(filled, layer):
    """The seqs of each head, in the cache's order."""
    return [[token["seq"] for token in head] for head in filled.heads(layer)]


def snapkv_of(filled, window=4, kernel=7):
    def expected(layer, target):
        heads = zip(filled.heads(layer, BOTH), vision(filled, layer), strict=True)
        return [
            reference_attention.snapkv(head, h, filled.bare[layer], target, seqs, window, kernel)
            for h, (head, seqs) in enumerate(heads)
        ]

    return expected


def infinipot_v_of(filled, budget, **settings):
    layers, per_frame = filled.cache.layers, filled.grid[0] * filled.grid[1]

    def expected(layer, target):
        heads = filled.heads(layer)
        return reference_infinipot_v.select(heads, layer, layers, budget, per_frame, target, INV_FREQ, **settings)

    return expected


class Accumulated:
    """H2O's sums as the reference has them: per layer and head, seq -> attention since the token came."""

    def __init__(self, filled, recent=0.5):
        self.filled, self.recent = filled, recent
        self.scores = [[{} for _ in range(HEADS)] for _ in range(filled.cache.layers)]

    def appended(self, layer, seqs):
        for h, head in enumerate(self.filled.heads(layer, BOTH)):
            known = self.scores[layer][h]
            for seq, new in reference_attention.mass(head, h, self.filled.bare[layer], seqs).items():
                known[seq] = known.get(seq, 0.0) + new

    def expected(self, layer, target):
        held = vision(self.filled, layer)
        return [reference_attention.h2o(self.scores[layer][h], target, held[h], self.recent) for h in range(HEADS)]


def without_sums(expected):
    """``expected``, and what is told of new rows: nothing."""
    return expected, lambda layer, seqs: None


def of_baseline(filled, keeps):
    return without_sums(lambda layer, target: [keeps(head, target) for head in filled.heads(layer)])


def h2o_of(filled):
    sums = Accumulated(filled)
    return sums.expected, sums.appended


def last_seen_of(filled):
    likeness = LastSeen(filled)
    return likeness.expected, likeness.appended


def coreset_of(filled, diversity=0.3, directions=64):
    """The order in which the deepest layer's tokens are taken decides in every layer, then age."""

    def expected(layer, target):
        heads = [sorted(head, key=lambda token: -token["seq"]) for head in filled.heads(filled.cache.layers - 1)]
        own = [{token["seq"]: unrotated(token, INV_FREQ) for token in head} for head in filled.heads(0)]
        points = [
            [[first.get(t["seq"], 0 * t["value"]), unrotated(t, INV_FREQ), t["value"]] for t in head]
            for first, head in zip(own, heads, strict=True)
        ]
        units = np.array(points, np.float64)  # [heads, n, 3, dim]
        units /= np.maximum(np.linalg.norm(units, axis=-1, keepdims=True), 1e-30)
        rows = units.transpose(1, 0, 2, 3).reshape(len(heads[0]), -1)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        taken, ahead = reference.coreset(rows, min(target, len(rows)), diversity, directions, 1024)
        if ahead < 1e-6:
            raise NearTieError
        rank = {token["seq"]: -len(rows) for token in heads[0]}
        rank |= {heads[0][row]["seq"]: -place for place, row in enumerate(taken)}
        return [
            {token["seq"] for token in best(head, [rank.get(token["seq"], -1e9) for token in head], target)}
            for head in filled.heads(layer)
        ]

    return without_sums(expected)


def first_seen_of(filled, reach=2):
    """A token's score is fixed when it is first ranked; those of layer 0 decide in every layer, then age."""
    scores = {}

    def expected(layer, target):
        heads = [sorted(head, key=lambda token: token["seq"]) for head in filled.heads(0)]
        rows = np.concatenate([[token["value"] for token in head] for head in heads], 1).astype(np.float64)
        seqs = [token["seq"] for token in heads[0]]
        new = {
            seq: 1 - max((cosine(rows[t], rows[s]) for s in range(t)), default=-1.0)
            for t, seq in enumerate(seqs) if seq not in scores
        }  # fmt: skip
        around = list(new)
        for at, seq in enumerate(around):
            scores[seq] = np.mean([new[other] for other in around[max(0, at - reach) : at + reach + 1]])
        held = {seq: scores[seq] for seq in seqs}
        return [
            {token["seq"] for token in best(head, [held.get(token["seq"], -9.0) for token in head], target)}
            for head in filled.heads(layer)
        ]

    return without_sums(expected)


def newest(head, target):
    return set(sorted(token["seq"] for token in head)[len(head) - target :])


def thinned(filled):
    per_frame = filled.grid[0] * filled.grid[1]
    return of_baseline(filled, lambda head, target: reference_baselines.uniform(head, target, per_frame))


def drawn(head, target):
    return reference_baselines.random_tokens([token["seq"] for token in head], target, 3)


REFERENCES = {  # the policy's text -> what play takes of the reference on a stream and a budget: expected, appended
    "sliding-window": lambda filled, _: of_baseline(filled, newest),
    "streaming-llm": lambda filled, _: of_baseline(filled, reference_baselines.streaming_llm),
    "uniform": lambda filled, _: thinned(filled),
    "random:seed=3": lambda filled, _: of_baseline(filled, drawn),
    "snapkv:window=4": lambda filled, _: without_sums(snapkv_of(filled)),
    "h2o": lambda filled, _: h2o_of(filled),
    "purekv:clie=1,window=4": lambda filled, _: without_sums(PureKV(filled, clie=1, window=4).expected),
    "infinipot-v": lambda filled, budget: without_sums(infinipot_v_of(filled, budget)),
    "coreset": lambda filled, _: coreset_of(filled),
    "last-seen": lambda filled, _: last_seen_of(filled),
    "first-seen": lambda filled, _: first_seen_of(filled),
}

"""SnapKV, H2O and PureKV, alone and as a booster, written down in float64, one row at a time: slow, and meant to be read.

A token is a dict with seq, position and key, as `Filled.heads` makes it; a head is a list of tokens, the prefix among them.
"""

import numpy as np
from policies.filled import DIM, GROUP, HEADS, Filled, turned

from edgevlm.runtime.cache import Kind


def row_attention(head, query, seq):
    """What one row, its query rotated, gives to each token it sees: seq -> weight."""
    seen = [token for token in head if token["seq"] <= seq]
    logits = np.array([token["key"].astype(np.float64) @ query for token in seen]) / np.sqrt(DIM)
    weights = np.exp(logits - logits.max())
    return dict(zip([token["seq"] for token in seen], weights / weights.sum(), strict=True))


def mass(head, kv_head, bare, rows):
    """What the rows ``rows`` give to each token, summed over them and over the query heads of the group: seq -> mass.

    bare: seq -> queries not rotated, ``[query heads, DIM]``. A row's query stands where its key stands in this head.
    """
    total = {token["seq"]: 0.0 for token in head}
    position = {token["seq"]: token["position"] for token in head}
    for seq in rows:
        for query in bare[seq][kv_head * GROUP : (kv_head + 1) * GROUP]:
            for other, weight in row_attention(head, turned(query, position[seq]), seq).items():
                total[other] += weight
    return total


def best(scores, count):
    """The ``count`` highest of seq -> score, as float32 has them; ties go to the newer token."""
    return set(sorted(scores, key=lambda seq: (np.float32(scores[seq]), seq), reverse=True)[:count])


def pooled(scores, kernel, pool):
    """Each score becomes the largest, or the mean, of those within ``kernel`` // 2 places of it by seq."""
    seqs, reach = sorted(scores), kernel // 2
    out = {}
    for i, seq in enumerate(seqs):
        near = [float(np.float32(scores[other])) for other in seqs[max(0, i - reach) : i + reach + 1]]
        out[seq] = max(near) if pool == "max" else sum(near) / len(near)
    return out


def snapkv(head, kv_head, bare, target, vision, window, kernel, pool):
    """The vision seqs that one head keeps; ``vision`` are those it holds."""
    seqs = sorted(vision)
    if target <= window:
        return set(seqs[len(seqs) - target :])
    observers, past = seqs[-window:], seqs[:-window]
    given = mass(head, kv_head, bare, observers)
    return set(observers) | best(pooled({seq: given[seq] for seq in past}, kernel, pool), target - window)


def h2o(accumulated, target, vision, recent):
    """The vision seqs that one head keeps, of seq -> attention accumulated."""
    seqs = sorted(vision)
    newest = seqs[len(seqs) - int(recent * target) :]
    return set(newest) | best({seq: accumulated[seq] for seq in seqs if seq not in newest}, target - len(newest))


class PureKV:
    """What every head keeps; remembers the last score that the CLIE layer gave each token it has held."""

    def __init__(self, filled: Filled, clie=2, window=32, values=True, cross=True):
        self.filled, self.window, self.values = filled, window, values
        self.clie = min(clie if cross else filled.cache.layers, filled.cache.layers - 1)
        self.remembered = [{} for _ in range(HEADS)]
        self.from_memory = 0  # tokens that were ranked by a score of an earlier compression

    def mass(self, layer, head, recent):
        """Eq. 2: seq -> S of all tokens that a head of a low layer holds."""
        there = self.filled.heads(layer, (Kind.PREFIX, Kind.VISION))[head]
        return mass(there, head, self.filled.bare[layer], recent)

    def importance(self, layer, head, recent):
        """Eqs. 3 and 4: seq -> S ||V|| of the tokens of a head that are not among the ``recent`` newest."""
        mass = self.mass(min(layer, self.clie), head, recent)
        if layer == self.clie:
            self.remembered[head].update(mass)
        scores = {}
        for token in self.filled.heads(layer)[head]:
            seq = token["seq"]
            if seq in recent:
                continue
            self.from_memory += seq not in mass
            attended = mass[seq] if seq in mass else self.remembered[head].get(seq, 0.0)
            scores[seq] = attended * (np.linalg.norm(token["value"].astype(np.float64)) if self.values else 1.0)
        return scores

    def expected(self, layer, target):
        kept = []
        for head in range(HEADS):
            seqs = sorted(token["seq"] for token in self.filled.heads(layer)[head])
            w = min(self.window, target // 2)
            recent = seqs[len(seqs) - w :]
            kept.append(set(recent) | best(self.importance(layer, head, recent), target - w))
        return kept


class Boosted(PureKV):
    """What every head keeps under a policy with ``clie``: PureKV's score in the place of its attention term (Tab. 6)."""

    first_frame = False  # whether frame 0 stays, beside which all is as without it

    def first(self, layer, head):
        return {token["seq"] for token in self.filled.heads(layer)[head] if self.first_frame and token["frame"] == 0}

    def seqs(self, layer, head):
        return sorted({token["seq"] for token in self.filled.heads(layer)[head]} - self.first(layer, head))

    def importance(self, layer, head, recent):
        fixed = self.first(layer, head)
        return {seq: score for seq, score in super().importance(layer, head, recent).items() if seq not in fixed}

    def each(self, layer, target, kept):
        """``kept(head, target, seqs)`` of every head, beside frame 0."""
        first = [self.first(layer, head) for head in range(HEADS)]
        return [of | kept(h, target - len(of), self.seqs(layer, h)) for h, of in enumerate(first)]

    def snapkv(self, layer, target):
        """SnapKV with a pool of the largest of 7."""
        return self.each(layer, target, lambda head, target, seqs: self._snapkv(layer, head, target, seqs))

    def _snapkv(self, layer, head, target, seqs):
        if target <= self.window:
            return set(seqs[len(seqs) - target :])
        observers = seqs[-self.window :]
        scores = self.importance(layer, head, observers)
        return set(observers) | best(pooled(scores, 7, "max"), target - self.window)

    def streaming_llm(self, layer, target, sinks=4, important=0.5):
        sinks = 0 if self.first_frame else min(sinks, target)
        return self.each(layer, target, lambda h, target, seqs: self._streaming(layer, seqs, h, target, sinks, important))

    def _streaming(self, layer, seqs, head, target, sinks, important):
        top = int(important * (target - sinks))
        window = seqs[len(seqs) - (target - sinks - top) :]
        observers = window[-32:]
        scores = self.importance(layer, head, observers) if observers else {}
        fixed = set(seqs[:sinks]) | set(window)
        return fixed | best({seq: score for seq, score in scores.items() if seq not in fixed}, top)


class BoostedH2O(Boosted):
    """Sums of the low layers: a token that one of them has dropped keeps the sum it had."""

    def __init__(self, filled, **settings):
        super().__init__(filled, **settings)
        self.sums = [[{} for _ in range(HEADS)] for _ in range(self.clie + 1)]

    def appended(self, layer, seqs):
        for head in range(HEADS if layer <= self.clie else 0):
            for seq, new in super().mass(layer, head, seqs).items():
                self.sums[layer][head][seq] = self.sums[layer][head].get(seq, 0.0) + new

    def mass(self, layer, head, recent):
        held = {token["seq"] for token in self.filled.heads(layer)[head]}
        return {seq: total for seq, total in self.sums[layer][head].items() if seq in held}

    def h2o(self, layer, target, recent=0.5):
        return self.each(layer, target, lambda head, target, seqs: self._h2o(layer, head, seqs, target, recent))

    def _h2o(self, layer, head, seqs, target, recent):
        newest = seqs[len(seqs) - int(recent * target) :]
        return set(newest) | best(self.importance(layer, head, newest), target - len(newest))

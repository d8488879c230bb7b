"""SnapKV, H2O and PureKV written down in float64, one row at a time: slow, and meant to be read.

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


def pooled(scores, kernel):
    """Each score becomes the largest of those within ``kernel`` // 2 places of it by seq."""
    seqs, reach = sorted(scores), kernel // 2
    out = {}
    for i, seq in enumerate(seqs):
        near = [float(np.float32(scores[other])) for other in seqs[max(0, i - reach) : i + reach + 1]]
        out[seq] = max(near)
    return out


def snapkv(head, kv_head, bare, target, vision, window, kernel):
    """The vision seqs that one head keeps; ``vision`` are those it holds."""
    seqs = sorted(vision)
    if target <= window:
        return set(seqs[len(seqs) - target :])
    observers, past = seqs[-window:], seqs[:-window]
    given = mass(head, kv_head, bare, observers)
    return set(observers) | best(pooled({seq: given[seq] for seq in past}, kernel), target - window)


def h2o(accumulated, target, vision, recent):
    """The vision seqs that one head keeps, of seq -> attention accumulated."""
    seqs = sorted(vision)
    newest = seqs[len(seqs) - int(recent * target) :]
    return set(newest) | best({seq: accumulated[seq] for seq in seqs if seq not in newest}, target - len(newest))


class PureKV:
    """What every head keeps; remembers the last score that the CLIE layer gave each token it has held."""

    def __init__(self, filled: Filled, clie=2, window=32):
        self.filled, self.window, self.clie = filled, window, min(clie, filled.cache.layers - 1)
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
            scores[seq] = attended * np.linalg.norm(token["value"].astype(np.float64))
        return scores

    def expected(self, layer, target):
        kept = []
        for head in range(HEADS):
            seqs = sorted(token["seq"] for token in self.filled.heads(layer)[head])
            w = min(self.window, target // 2)
            recent = seqs[len(seqs) - w :]
            kept.append(set(recent) | best(self.importance(layer, head, recent), target - w))
        return kept

"""PureKV written down from the specification in float64, one token at a time: slow, and meant to be read."""

import numpy as np
from policies import reference_attention
from policies.filled import HEADS, Filled

from edgevlm.runtime.cache import Kind


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
        return reference_attention.mass(there, head, self.filled.bare[layer], recent)

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
            kept.append(set(recent) | reference_attention.best(self.importance(layer, head, recent), target - w))
        return kept

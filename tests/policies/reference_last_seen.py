"""last-seen written down in float64, one pair of tokens at a time.

A token is a dict with seq, position and key, as `Filled.heads` makes it; a head is a list of tokens, the prefix not among them.
"""

from policies.filled import HEADS, INV_FREQ
from policies.reference_infinipot_v import best, cosine, unrotated


class LastSeen:
    """u as the reference has it: per head of the layer that ranks, seq -> highest cosine with any token that came later."""

    def __init__(self, filled):
        self.filled, self.layer = filled, filled.cache.layers - 1
        self.likeness = [{} for _ in range(HEADS)]

    def met(self, head, seqs):
        """Each token's highest cosine with those of ``seqs`` that are newer; -1 where there is none."""
        keys = {token["seq"]: unrotated(token, INV_FREQ) for token in head}
        return {
            seq: max((cosine(key, keys[other]) for other in seqs if other > seq and other in keys), default=-1.0)
            for seq, key in keys.items()
        }

    def appended(self, layer, seqs):
        if layer == self.layer:
            for known, head in zip(self.likeness, self.filled.heads(layer), strict=True):
                for seq, likeness in self.met(head, seqs).items():
                    known[seq] = max(known.get(seq, -1.0), likeness)

    def expected(self, layer, target):
        ranked = self.filled.heads(self.layer)
        likeness = [{token["seq"]: self.likeness[h][token["seq"]] for token in head} for h, head in enumerate(ranked)]
        mean = {seq: sum(of[seq] for of in likeness) / HEADS for seq in likeness[0]}
        return [
            {token["seq"] for token in best(head, [-mean.get(token["seq"], 2.0) for token in head], target)}
            for head in self.filled.heads(layer)
        ]

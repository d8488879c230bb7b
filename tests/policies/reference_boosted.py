"""PureKV's score in the place of other policies' attention term (Tab. 6), in float64, one token at a time."""

from policies import reference_attention
from policies.filled import HEADS
from policies.reference_purekv import PureKV

best = reference_attention.best


class Boosted(PureKV):
    """What every head keeps under a policy with ``clie``."""

    def seqs(self, layer, head):
        return sorted(token["seq"] for token in self.filled.heads(layer)[head])

    def snapkv(self, layer, target):
        """SnapKV with a pool of the largest of 7."""
        return [self._snapkv(layer, head, target, self.seqs(layer, head)) for head in range(HEADS)]

    def _snapkv(self, layer, head, target, seqs):
        if target <= self.window:
            return set(seqs[len(seqs) - target :])
        observers = seqs[-self.window :]
        scores = self.importance(layer, head, observers)
        return set(observers) | best(reference_attention.pooled(scores, 7, "max"), target - self.window)

    def streaming_llm(self, layer, target, sinks=4, important=0.5):
        return [self._streaming(layer, self.seqs(layer, h), h, target, min(sinks, target), important) for h in range(HEADS)]

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
        kept = []
        for head in range(HEADS):
            seqs = self.seqs(layer, head)
            newest = seqs[len(seqs) - int(recent * target) :]
            kept.append(set(newest) | best(self.importance(layer, head, newest), target - len(newest)))
        return kept

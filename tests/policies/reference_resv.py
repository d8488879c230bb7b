"""ReSV token by token, in float64 (V-Rex, sec. IV): bits, clusters and WiCSum, for one KV head."""

import numpy as np


def hash_bits(key, planes):
    """A word whose bit p is 1 where the dot with plane p of ``planes [D, P]`` is above 0."""
    dots = np.asarray(key, np.float64) @ np.asarray(planes, np.float64)
    return sum(1 << place for place, dot in enumerate(dots) if dot > 0)


def differ(one, other):
    return (one ^ other).bit_count()


class Cluster:
    """Tokens by ``seq``, with their keys and places; the mean of both and its bits. ``open``: more may join."""

    def __init__(self, tokens, planes, *, opened):
        self.planes, self.open = planes, opened
        self.hold(tokens)

    def hold(self, tokens):
        self.tokens = tokens
        if tokens:
            self.key, self.place = (np.mean([token[part] for token in tokens.values()], 0) for part in (0, 1))
            self.bits = hash_bits(self.key, self.planes)

    @property
    def seq(self):
        return sorted(self.tokens)


class ReferenceClusters:
    """The clusters of one KV head, by slot: see ``HashClusters``."""

    def __init__(self, slots, planes, below):
        """below: Th_hp; a token joins a cluster from which it differs in fewer bits, as the paper has it; 0: none."""
        self.slots, self.planes, self.below = slots, planes, below
        self.at, self.merged, self.forced = {}, 0, 0

    def free(self):
        return min(set(range(self.slots)) - set(self.at))

    def sealed(self):
        return [slot for slot in sorted(self.at) if not self.at[slot].open]

    def opened(self):
        return [slot for slot in sorted(self.at) if self.at[slot].open]

    def join(self, seq, key, place):
        key, place = np.asarray(key, np.float64), np.asarray(place, np.float64)
        bits, opened = hash_bits(key, self.planes), self.opened()
        near = min(opened, key=lambda slot: (differ(bits, self.at[slot].bits), slot), default=None)
        within = near is not None and differ(bits, self.at[near].bits) < self.below
        if within or len(opened) >= self.slots // 2:
            self.forced += not within
            self.at[near].hold({**self.at[near].tokens, seq: (key, place)})
        else:
            near = self.free()
            self.at[near] = Cluster({seq: (key, place)}, self.planes, opened=True)
        self.make_room()
        return near

    def seal(self, leaving):
        """``leaving``: a set of seqs. What leaves of each open cluster is a cluster of its own, in the order of their slots."""
        parts = []
        for slot in self.opened():
            tokens = self.at[slot].tokens
            gone = {seq: token for seq, token in tokens.items() if seq in leaving}
            if gone:
                parts.append(Cluster(gone, self.planes, opened=False))
                self.at[slot].hold({seq: token for seq, token in tokens.items() if seq not in leaving})
            if not self.at[slot].tokens:
                del self.at[slot]
        for part in parts:
            self.at[self.free()] = part
            self.make_room()

    def make_room(self):
        """No slot is free: a sealed pair merges, of the fewest bits that differ, the fewest tokens, the lowest slots."""
        if len(self.at) < self.slots:
            return
        sealed = self.sealed()
        pairs = [(a, b) for a in sealed for b in sealed if a < b]
        bits = {slot: self.at[slot].bits for slot in sealed}
        size = {slot: len(self.at[slot].tokens) for slot in sealed}
        a, b = min(pairs, key=lambda pair: (differ(bits[pair[0]], bits[pair[1]]), size[pair[0]] + size[pair[1]], pair))
        self.at[a].hold(self.at[a].tokens | self.at.pop(b).tokens)
        self.merged += 1

    def choose(self, query, share):
        return wicsum(query, {slot: cluster.key for slot, cluster in self.at.items()},
                      {slot: len(cluster.tokens) for slot, cluster in self.at.items()}, share)  # fmt: skip


def wicsum(query, keys, counts, share):
    """Eqs. 1 to 3 with a softmax over clusters: the highest score of each one that some row ``[rows, D]`` chooses, by slot.

    Also the least distance, as a share of the row's sum, that any sum along the way had from the threshold.
    """
    slots, best, margin = sorted(keys), {}, np.inf
    matrix, tokens = np.array([keys[slot] for slot in slots]), np.array([counts[slot] for slot in slots], np.float64)
    for row in np.asarray(query, np.float64):
        raw = matrix @ row / np.sqrt(len(row))
        score = np.exp(raw - raw.max())
        score /= score.sum()
        total = (score * tokens).sum()
        reached = 0.0
        for index in sorted(range(len(slots)), key=lambda i: (-score[i], slots[i])):
            reached += score[index] * tokens[index]
            best[slots[index]] = max(best.get(slots[index], 0.0), score[index])
            margin = min(margin, abs(reached / total - share))
            if reached > total * share:
                break
    return best, margin

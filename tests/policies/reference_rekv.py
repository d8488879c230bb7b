"""ReKV's index and choice, slowly and in float64: lists of frames, every cost and every product computed anew."""

import numpy as np


class Frames:
    """Of one layer. Entries ``[frames, mean]`` in temporal order; ``capacity`` of them."""

    def __init__(self, capacity):
        self.capacity, self.entries, self.merged = capacity, [], 0

    def add(self, number, keys):
        """A frame's un-rotated keys ``[tokens, heads, head_dim]``."""
        if len(self.entries) == self.capacity:
            costs = [self.cost(*pair) for pair in zip(self.entries, self.entries[1:], strict=False)]
            at = int(np.argmin(costs))
            (ours, mean), (theirs, other) = self.entries[at : at + 2]
            both = (len(ours) * mean + len(theirs) * other) / (len(ours) + len(theirs))
            self.entries[at : at + 2] = [[ours + theirs, both]]
            self.merged += 1
        self.entries.append([[number], np.mean(keys, 0)])

    @staticmethod
    def cost(one, other):
        a, b = len(one[0]), len(other[0])
        return a * b / (a + b) * np.sum((one[1] - other[1]) ** 2)

    def best(self, query, most, each):
        """query: un-rotated, ``[query heads, rows, head_dim]``. Numbers of frames, best first."""
        chosen = []
        for frames, _ in sorted(self.entries, key=lambda entry: (-self.score(entry[1], query), -entry[0][0])):
            parts = min(each, len(frames))
            chosen += [frames[int((part + 0.5) * len(frames) / parts)] for part in range(parts)]
        return chosen[:most]

    @staticmethod
    def score(mean, query):
        group = len(query) // len(mean)
        return sum(np.mean([row @ mean[h // group] for row in rows]) for h, rows in enumerate(query))

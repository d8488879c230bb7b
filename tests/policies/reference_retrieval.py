"""ReKV's frames and the hybrid's clusters written down in float64, one at a time: slow, and meant to be read."""

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


def cosine(x, y):
    return x @ y / (np.linalg.norm(x) * np.linalg.norm(y))


class Alike:
    """Clusters: lists of tokens by number. ``keys[layer][token]``: ``[width]``."""

    def __init__(self, capacity, tau):
        self.capacity, self.tau, self.clusters, self.keys, self.merged = capacity, tau, [], [], 0

    def mean(self, layer, cluster):
        return np.mean([self.keys[layer][token] for token in cluster], 0)

    def nearest(self, own):
        alike = [cosine(self.mean(-1, cluster), own) for cluster in self.clusters]
        return (int(np.argmax(alike)), max(alike)) if alike else (0, -2.0)

    def add(self, keys):
        """One token, ``[layers, width]``."""
        self.keys = self.keys or [[] for _ in keys]
        token = len(self.keys[0])
        at, best = self.nearest(keys[-1])
        if best < self.tau and len(self.clusters) == self.capacity:
            self.merge()
            at, best = self.nearest(keys[-1])
        for layer, key in enumerate(keys):
            self.keys[layer].append(key)
        if best < self.tau:
            self.clusters.append([token])
        else:
            self.clusters[at].append(token)

    def merge(self):
        means = [self.mean(-1, cluster) for cluster in self.clusters]
        pairs = [(i, j) for i in range(len(means)) for j in range(i)]
        alike = [cosine(means[i], means[j]) for i, j in pairs]
        one, other = pairs[int(np.argmax(alike))]
        self.tau, self.merged = min(self.tau, max(alike)), self.merged + 1
        self.clusters[one] += self.clusters[other]
        del self.clusters[other]


def sketched_product(query, key, middle, spread):
    """The hybrid's product of a row and a key of 4 pairs, of which it looks at the slow two, ``[8]`` each."""
    product = 0.0
    for channel in (2, 3, 6, 7):
        z = (key[channel] - middle[channel]) / spread[channel]
        product += query[channel] * spread[channel] * np.sign(z) * (1.5104 if abs(z) > 0.9816 else 0.4528)
    return product

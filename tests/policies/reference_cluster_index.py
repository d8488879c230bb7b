"""The hybrid's index, slowly and in float64: clusters as lists of tokens, every mean and cosine computed anew."""

import numpy as np


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

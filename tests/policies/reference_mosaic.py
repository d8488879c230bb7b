"""Mosaic as its paper has it, one token after another in float64: lists of members, nothing incremental but eqs. 3 and 4."""

from dataclasses import dataclass, field

import numpy as np

RATE, LEAST, FLOOR, EARLY_ROWS, EARLY_FRAMES, SCENE = 32, 8, 1e-3, 64, 16, 2


def cosine(a, b):
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b) / lengths if lengths > 0 else 0.0


def early_variance(rows):
    """Eqs. 3 and 4 over rows, as one cluster."""
    mean, variance = np.zeros(len(rows[0])), 0.0
    for n, row in enumerate(rows, 1):
        mean = mean + (row - mean) / n
        variance += (1 - cosine(row, mean) - variance) / n
    return variance


def threshold(size, small, large):
    """Eq. 5."""
    return large - (large - small) * np.exp(-size / RATE)


def is_over(variance, size, limits):
    return limits is not None and size >= LEAST and variance > threshold(size, *limits)


def joined(mean, variance, size, row):
    """Eqs. 3 and 4 for a newcomer: mean, variance and size with it."""
    mean = mean + (row - mean) / (size + 1)
    return mean, variance + (1 - cosine(row, mean) - variance) / (size + 1), size + 1


def two_of(rows):
    """K-means for two by cosine: the indices of each, the second empty if there is but one."""
    unit = [row / max(np.linalg.norm(row), 1e-300) for row in rows]
    middle = np.mean(unit, 0)
    first = min(range(len(rows)), key=lambda i: cosine(unit[i], middle))
    second = min(range(len(rows)), key=lambda i: cosine(unit[i], unit[first]))
    centres, last = [unit[first], unit[second]], None
    for _ in range(8):
        mine = [i for i, row in enumerate(unit) if cosine(row, centres[1]) > cosine(row, centres[0])]
        if mine in ([], last) or len(mine) == len(rows):
            break
        last, other = mine, [i for i in range(len(rows)) if i not in mine]
        centres = [np.mean([rows[i] for i in part], 0) for part in (other, mine)]
    last = last or []
    return [i for i in range(len(rows)) if i not in last], last


def attention(queries, keys):
    """The mean over rows of softmax(q K^T / sqrt D)."""
    total = np.zeros(len(keys))
    for query in queries:
        weight = np.exp(np.array([query @ key for key in keys]) / np.sqrt(len(query)))
        total += weight / weight.sum()
    return total / len(queries)


@dataclass(eq=False)
class Cluster:
    mean: np.ndarray
    value: np.ndarray
    partition: int
    variance: float = 0.0
    size: int = 1
    members: list = field(default_factory=list)  # tokens that are below
    newest: dict | None = None
    parent: "Cluster | None" = None


class Visual:
    """Partitions of frames by feature."""

    def __init__(self, slots, small, large):
        self.slots, self.times, self.limits = slots, (SCENE * small, SCENE * large), None
        self.known, self.of, self.seen = {}, {}, []  # number -> (mean, variance, size); frame -> number; features
        self.next = 0

    def take(self, frame, feature):
        """Returns (which stays, which is gone) when two have become one."""
        self.seen.append(feature)
        merged = None
        if len(self.seen) == EARLY_FRAMES and self.slots > 1:
            self.limits = [max(FLOOR, times * early_variance(self.seen)) for times in self.times]
        nearest = max(self.known, key=lambda number: cosine(feature, self.known[number][0]), default=None)
        if nearest is not None and not is_over(*(after := joined(*self.known[nearest], feature))[1:], self.limits):
            self.known[nearest], self.of[frame] = after, nearest
            return None
        if len(self.known) == self.slots:
            merged = self.merge()
        self.known[self.next], self.of[frame] = (feature, 0.0, 1), self.next
        self.next += 1
        return merged

    def merge(self):
        pairs = [(a, b) for a in self.known for b in self.known if a < b]
        into, gone = max(pairs, key=lambda pair: cosine(self.known[pair[0]][0], self.known[pair[1]][0]))
        self.known[into] = one_of(self.known[into], self.known.pop(gone))
        self.of = {frame: into if number == gone else number for frame, number in self.of.items()}
        return into, gone


def one_of(a, b):
    """(mean, variance, size) of two as one."""
    size = a[2] + b[2]
    mean = (a[2] * a[0] + b[2] * b[0]) / size
    return mean, sum(n * (s + 1 - cosine(c, mean)) for c, s, n in (a, b)) / size, size


class Head:
    """One layer and KV head. limits: gives (tau_s, tau_l) or None; resident: whether every cluster is in host memory."""

    def __init__(self, slots, limits, resident):
        self.slots, self.limits, self.resident = slots, limits, resident
        self.clusters, self.splits, self.deferred, self.merges = [], 0, 0, 0

    @property
    def full(self):
        return len(self.clusters) == self.slots

    def take(self, token, partition):
        mine = [cluster for cluster in self.clusters if cluster.partition == partition]
        if not mine:
            if self.full:
                self.merge()
            return self.found(token, partition)
        cluster = max(mine, key=lambda one: cosine(token["bare"], one.mean))
        after = joined(cluster.mean, cluster.variance, cluster.size, token["bare"])
        if self.full or not is_over(*after[1:], self.limits()):
            cluster.mean, cluster.variance, cluster.size = after
            self.keep(cluster, token)
        elif self.resident:
            self.split(cluster, token)
        else:
            self.found(token, partition).parent = cluster
            self.deferred += 1

    def found(self, token, partition):
        cluster = Cluster(token["bare"], np.zeros_like(token["bare"]), partition)
        self.clusters.append(cluster)
        self.keep(cluster, token)
        return cluster

    def keep(self, cluster, token):
        cluster.value = cluster.value + (token["value"] - cluster.value) / cluster.size
        cluster.members.append(token)
        cluster.newest = token
        cluster.members.sort(key=lambda one: one["seq"])

    def split(self, cluster, token=None):
        waiting = [other for other in self.clusters if other.parent is cluster]
        members = [*cluster.members, *(one for other in waiting for one in other.members), *([token] if token else [])]
        members.sort(key=lambda one: one["seq"])
        for gone in (cluster, *waiting):
            self.remove(gone)
        parts = two_of([one["bare"] for one in members])
        self.splits += bool(parts[1])
        for part in filter(None, parts):
            mine = [members[i] for i in part]
            mean = np.mean([one["bare"] for one in mine], 0)
            variance = np.mean([1 - cosine(one["bare"], mean) for one in mine])
            value = np.mean([one["value"] for one in mine], 0)
            self.clusters.append(Cluster(mean, value, cluster.partition, variance, len(mine), mine, mine[-1]))

    def remove(self, cluster):
        self.clusters = [other for other in self.clusters if other is not cluster]
        for other in self.clusters:
            if other.parent is cluster:
                other.parent = None

    def merge(self):
        """Free one slot in 16; of the pairs none is in two."""
        pairs = [(a, b) for i, a in enumerate(self.clusters) for b in self.clusters[i + 1 :] if a.partition == b.partition]
        pairs.sort(key=lambda pair: -cosine(pair[0].mean, pair[1].mean))
        used = []
        for a, b in pairs:
            if len(used) < 2 * max(1, self.slots // 16) and not any(one is a or one is b for one in used):
                used += [a, b]
                self.join(a, b)
                self.merges += 1

    def join(self, a, b):
        into, gone = (a, b) if a.size >= b.size else (b, a)
        into.value = (into.size * into.value + gone.size * gone.value) / (into.size + gone.size)
        after = one_of((into.mean, into.variance, into.size), (gone.mean, gone.variance, gone.size))
        into.mean, into.variance, into.size = after
        into.members = sorted(into.members + gone.members, key=lambda one: one["seq"])
        into.newest = max(into.newest, gone.newest, key=lambda one: one["seq"])
        for other in self.clusters:
            if other.parent is gone:
                other.parent = into
        if into.parent in (into, gone):
            into.parent = None
        self.remove(gone)

    def relabel(self, into, gone):
        for cluster in self.clusters:
            cluster.partition = into if cluster.partition == gone else cluster.partition

    def select(self, queries, partitions, room):
        """Clusters, best first; those that waited are split on the way, and the choice is made again."""
        chosen = self.ranked(queries, partitions, room)
        waiting = [cluster for cluster in chosen if any(other.parent is cluster for other in self.clusters)]
        for cluster in waiting:
            self.split(cluster)
        return self.ranked(queries, partitions, room) if waiting else chosen

    def ranked(self, queries, partitions, room):
        room -= len(self.clusters)
        if not self.clusters:
            return []
        labels = sorted({cluster.partition for cluster in self.clusters})
        inside = [[cluster for cluster in self.clusters if cluster.partition == label] for label in labels]
        means = [np.average([one.mean for one in of], axis=0, weights=[one.size for one in of]) for of in inside]
        best = np.argsort(-attention(queries, means), kind="stable")[:partitions]
        looked = {labels[i] for i in best}
        share = attention(queries, [cluster.mean for cluster in self.clusters])
        order = sorted(range(len(share)), key=lambda i: -share[i])
        chosen, rows = [], 0
        for cluster in (self.clusters[i] for i in order):
            if cluster.partition in looked and cluster.size > 1 and rows < room:
                chosen.append(cluster)
                rows += len(cluster.members)
        return chosen

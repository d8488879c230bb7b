"""An index of what is alike: a fixed number of clusters of tokens, each with its mean keys in every layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


class AlikeIndex:
    """Up to ``capacity`` clusters, allocated once, ``entry_bytes`` each.

    A token joins the cluster whose mean key in the deepest layer has the highest cosine with its own, if that is ``tau`` or
    more, else it founds one. When there is no place, the two clusters that are most alike merge first, and from then on what is
    no less alike than those were joins: ``tau`` falls to their cosine. ``merged`` counts.

    mean: ``[layers, capacity, width]``, of all tokens that ever joined, ``count`` of them. extents: numbers of the two blocks
    that hold the cluster's newest tokens in each layer, the newer last, -1 for none, ``[capacity, layers, 2]``; rows: how many
    are in each, ``[capacity, 2]``.
    """

    def __init__(self, layers: int, width: int, most_bytes: int, tau: float) -> None:
        self.capacity = most_bytes // self.entry_bytes(layers, width)
        self.mean = np.zeros((layers, self.capacity, width), np.float32)
        self.count = np.zeros(self.capacity, np.int64)
        self.extents = np.full((self.capacity, layers, 2), -1, np.int64)
        self.rows = np.zeros((self.capacity, 2), np.int32)
        self.clusters, self.merged, self.tau = 0, 0, tau

    @staticmethod
    def entry_bytes(layers: int, width: int) -> int:
        """Of one cluster in all layers."""
        return layers * (4 * width + 16) + 16

    def join(self, keys: Float32) -> tuple[Int64, list[int]]:
        """Tokens ``[layers, n, width]`` join, one after another.

        Returns the cluster of each, ``[n]``, and the numbers of blocks that no cluster has any more.
        """
        joined, dropped = np.zeros(keys.shape[1], np.int64), list[int]()
        deepest = _unit(keys[-1])
        for token, own in enumerate(deepest):
            at, best = self._nearest(own)
            if best < self.tau:
                if self.clusters == self.capacity:
                    kept, gone, numbers = self._merge()
                    dropped += numbers
                    joined[:token][joined[:token] == gone] = kept
                    last = self.clusters  # the last cluster has taken the place of the one that is gone
                    joined[:token][joined[:token] == last] = gone
                    at, best = self._nearest(own)
                if best < self.tau:
                    at = self.clusters
                    self.clusters += 1
                    self.count[at], self.extents[at], self.rows[at] = 0, -1, 0
            self.count[at] += 1
            self.mean[:, at] += (keys[:, token] - self.mean[:, at]) / np.float32(self.count[at])
            joined[token] = at
        return joined, dropped

    def _nearest(self, own: Float32) -> tuple[int, float]:
        if not self.clusters:
            return 0, -2.0
        means = self.mean[-1, : self.clusters]
        cosine = means @ own / np.maximum(np.linalg.norm(means, axis=1), 1e-30)
        at = int(cosine.argmax())
        return at, float(cosine[at])

    def _merge(self) -> tuple[int, int, list[int]]:
        """The two that are most alike become one: which stays, which is gone, and the blocks that are over."""
        unit = _unit(self.mean[-1, : self.clusters])
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, -2)
        one, other = sorted(divmod(int(cosine.argmax()), self.clusters))
        self.tau, self.merged = min(self.tau, float(cosine[one, other])), self.merged + 1
        share = np.float32(self.count[other] / (self.count[one] + self.count[other]))
        self.mean[:, one] += share * (self.mean[:, other] - self.mean[:, one])
        self.count[one] += self.count[other]
        numbers = np.concatenate([self.extents[one], self.extents[other]], 1)  # [layers, 4]
        rows = np.concatenate([self.rows[one], self.rows[other]])
        newest = np.sort(np.argsort(numbers[0], kind="stable")[-2:])
        newest = newest[np.argsort(numbers[0][newest])]  # blocks are numbered as they were begun
        over = np.delete(numbers, newest, 1)
        self.extents[one], self.rows[one] = numbers[:, newest], rows[newest]
        last = self.clusters - 1
        for part in (self.count, self.extents, self.rows):
            part[other] = part[last]
        self.mean[:, other] = self.mean[:, last]
        self.clusters = last
        return one, other, over[over >= 0].tolist()

    def state(self) -> dict[str, NDArray]:
        """Views of all that is kept, for a snapshot."""
        held = slice(self.clusters)
        parts: dict[str, NDArray] = {"mean": self.mean[:, held]}
        parts |= {part: getattr(self, part)[held] for part in ("count", "extents", "rows")}
        return {**parts, "merged": np.array(self.merged), "tau": np.array(self.tau)}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Go on from :meth:`state`. Raises ValueError for one of another shape."""
        self.clusters = len(state["count"])
        held = slice(self.clusters)
        self.mean[:, held] = state["mean"]
        for part in ("count", "extents", "rows"):
            getattr(self, part)[held] = state[part]
        self.merged, self.tau = int(state["merged"]), float(state["tau"])


def _unit(x: Float32) -> Float32:
    unit: Float32 = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-30))
    return unit

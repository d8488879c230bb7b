"""An index of what is alike: a fixed number of clusters of tokens, each with its mean keys in every layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


CODES = 32  # of a mean that have one scale, so that a channel of large numbers costs its neighbours alone their precision


class AlikeIndex:
    """Up to ``capacity`` clusters, allocated once, ``entry_bytes`` each.

    A token joins the cluster whose mean key in the deepest layer has the highest cosine with its own, if that is ``tau`` or
    more, else it founds one. When there is no place, the two clusters that are most alike merge first, and from then on what is
    no less alike than those were joins: ``tau`` falls to their cosine. ``merged`` counts.

    A mean is of all tokens that ever joined, ``count`` of them, and kept as int8 codes, ``[layers, capacity, width]``, with a
    float16 ``scale`` for each CODES of them: what changes it by less than half a code leaves it as it is. extents: of the two
    runs of blocks that hold the cluster's newest tokens, one block a layer, the first number, the newer last, -1 for none,
    ``[capacity, 2]``; rows: how many tokens are in each, ``[capacity, 2]``.
    """

    PARTS = ("count", "extents", "rows")

    def __init__(self, layers: int, width: int, most_bytes: int, tau: float) -> None:
        self.capacity, self._layers = most_bytes // self.entry_bytes(layers, width), layers
        self.codes = np.zeros((layers, self.capacity, width), np.int8)
        self.scale = np.zeros((layers, self.capacity, _scales(width)), np.float16)
        self.count = np.zeros(self.capacity, np.int64)
        self.extents = np.full((self.capacity, 2), -1, np.int64)
        self.rows = np.zeros((self.capacity, 2), np.int32)
        self.clusters, self.merged, self.tau = 0, 0, tau

    @staticmethod
    def entry_bytes(layers: int, width: int) -> int:
        """Of one cluster in all layers."""
        return layers * (width + 2 * _scales(width)) + 32

    def means(self, layer: int) -> Float32:
        """The mean keys of a layer, ``[clusters, width]``."""
        return self._numbers(np.s_[layer, : self.clusters])

    def join(self, keys: Float32) -> tuple[Int64, list[int]]:
        """Tokens ``[layers, n, width]`` join, one after another.

        Returns the cluster of each, ``[n]``, and the numbers of blocks that no cluster has any more.
        """
        joined, dropped = np.zeros(keys.shape[1], np.int64), list[int]()
        unit = np.zeros(self.codes.shape[1:], np.float32)  # of the means of the deepest layer
        unit[: self.clusters] = _unit(self.means(-1))
        for token, own in enumerate(_unit(keys[-1])):
            at, best = self._nearest(unit, own)
            if best < self.tau:
                if self.clusters == self.capacity:
                    kept, gone, numbers = self._merge(unit)
                    dropped += numbers
                    joined[:token][joined[:token] == gone] = kept
                    last = self.clusters  # the last cluster has taken the place of the one that is gone
                    joined[:token][joined[:token] == last] = gone
                    at, best = self._nearest(unit, own)
                if best < self.tau:
                    at = self.clusters
                    self.clusters += 1
                    self.count[at], self.extents[at], self.rows[at] = 0, -1, 0
            self.count[at] += 1
            self._move(at, keys[:, token], 1 / self.count[at], unit)
            joined[token] = at
        return joined, dropped

    def _nearest(self, unit: Float32, own: Float32) -> tuple[int, float]:
        if not self.clusters:
            return 0, -2.0
        cosine = unit[: self.clusters] @ own
        at = int(cosine.argmax())
        return at, float(cosine[at])

    def _merge(self, unit: Float32) -> tuple[int, int, list[int]]:
        """The two that are most alike become one: which stays, which is gone, and the blocks that are over."""
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, -2)
        one, other = sorted(divmod(int(cosine.argmax()), self.clusters))
        self.tau, self.merged = min(self.tau, float(cosine[one, other])), self.merged + 1
        self.count[one] += self.count[other]
        self._move(one, self._numbers(np.s_[:, other]), self.count[other] / self.count[one], unit)
        numbers = np.concatenate([self.extents[one], self.extents[other]])
        rows = np.concatenate([self.rows[one], self.rows[other]])
        *over, older, newer = np.argsort(numbers, kind="stable").tolist()  # blocks are numbered as they were begun
        self.extents[one], self.rows[one] = numbers[[older, newer]], rows[[older, newer]]
        self.clusters = last = self.clusters - 1
        for part in (self.count, self.extents, self.rows, unit):
            part[other] = part[last]
        for part in (self.codes, self.scale):
            part[:, other] = part[:, last]
        return one, other, [first + layer for first in numbers[over].tolist() if first >= 0 for layer in range(self._layers)]

    def _move(self, at: int, keys: Float32, share: float, unit: Float32) -> None:
        """A cluster's mean goes ``share`` of the way to ``keys`` ``[layers, width]``."""
        mean = self._numbers(np.s_[:, at])
        mean += np.float32(share) * (keys - mean)
        parts = mean.reshape(*self.scale[:, at].shape, self.codes.shape[2] // self.scale.shape[2])
        scale = (np.abs(parts).max(2) / 127).astype(np.float16)
        self.scale[:, at] = scale
        codes = parts / np.maximum(scale.astype(np.float32), np.float32(1e-30))[..., None]
        self.codes[:, at] = np.clip(np.rint(codes), -127, 127).reshape(mean.shape)
        unit[at] = _unit(self._numbers(np.s_[-1, at]))

    def _numbers(self, which: tuple[slice | int, ...]) -> Float32:
        """Means as numbers, ``[..., width]``."""
        scale = self.scale[which].astype(np.float32)
        numbers: Float32 = self.codes[which] * np.repeat(scale, self.codes.shape[2] // self.scale.shape[2], -1)
        return numbers

    def state(self) -> dict[str, NDArray]:
        """Views of all that is kept, for a snapshot."""
        held = slice(self.clusters)
        parts: dict[str, NDArray] = {"codes": self.codes[:, held], "scale": self.scale[:, held]}
        parts |= {part: getattr(self, part)[held] for part in self.PARTS}
        return {**parts, "merged": np.array(self.merged), "tau": np.array(self.tau)}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Go on from :meth:`state`. Raises ValueError for one of another shape."""
        self.clusters = len(state["count"])
        held = slice(self.clusters)
        self.codes[:, held], self.scale[:, held] = state["codes"], state["scale"]
        for part in self.PARTS:
            getattr(self, part)[held] = state[part]
        self.merged, self.tau = int(state["merged"]), float(state["tau"])


def _scales(width: int) -> int:
    """Of a mean of ``width`` numbers: one where they are not a multiple of CODES."""
    return width // CODES if width % CODES == 0 else 1


def _unit(x: Float32) -> Float32:
    unit: Float32 = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-30))
    return unit

"""``hybrid``, a policy of ours, groups evicted tokens into clusters and stores each cluster's newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.base import Float32, setting
from edgevlm.runtime.policies.last_seen import LastSeen
from edgevlm.runtime.policies.layer import normalized
from edgevlm.runtime.policies.retrieval import Chosen, Int64, QuestionRetrieval, block_of, by_seq
from edgevlm.runtime.retrieval.working_set import unrotated_keys
from edgevlm.runtime.stateful import Stateful, bytes_of
from edgevlm.runtime.store import Block, Store

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


NO_COSINE = -2.0
CODES = 32  # codes of a mean that share a scale: a channel with large numbers lowers only its neighbours' precision


class ClusterIndex(Stateful):
    """An index of up to ``capacity`` clusters. All its memory is allocated once, ``entry_bytes`` bytes for each cluster.

    A token joins the cluster whose mean key in the deepest layer has the highest cosine with the token's key. If the highest
    cosine is below ``tau``, the token starts a new cluster. If the index is full, the two most similar clusters merge first,
    and ``tau`` is lowered to the cosine of these two clusters.

    ``codes``: the clusters' means, int8 ``[capacity, width]``. ``scale``: one float16 factor for every CODES values of a mean.
    Because of the rounding to int8, a mean stops changing after a few dozen tokens. ``sketch``: the sketch of each cluster's
    newest token, ``[capacity, sketch_bytes]``. ``runs``: the two newest runs of each cluster, ``[capacity, 2]``. A run is a set
    of blocks, one per layer, with the same tokens. A run is identified by the number of its first block, and -1 means no run;
    the older run comes first. ``rows``: the number of tokens in each of these runs, ``[capacity, 2]``. ``near``: each cluster's
    highest cosine with another cluster, ``[capacity]``. ``nearest``: each cluster's most similar cluster, ``[capacity]``.
    """

    PARTS = ("count", "runs", "rows", "near", "nearest", "codes", "scale", "sketch")

    state_fields = (*PARTS, "clusters", "merged", "tau")

    def __init__(self, layers: int, width: int, sketch_bytes: int, most_bytes: int, tau: float) -> None:
        self.capacity, self._layers = max(0, most_bytes) // self.entry_bytes(width, sketch_bytes), layers
        self.codes = np.zeros((self.capacity, width), np.int8)
        self.scale = np.zeros((self.capacity, _scales(width)), np.float16)
        self.sketch = np.zeros((self.capacity, sketch_bytes), np.uint8)
        self.count = np.zeros(self.capacity, np.int64)
        self.runs = np.full((self.capacity, 2), -1, np.int64)
        self.rows = np.zeros((self.capacity, 2), np.int32)
        self.near, self.nearest = np.full(self.capacity, NO_COSINE, np.float32), np.zeros(self.capacity, np.int32)
        self.clusters, self.merged, self.tau = 0, 0, tau

    @staticmethod
    def entry_bytes(width: int, sketch_bytes: int) -> int:
        return width + 2 * _scales(width) + sketch_bytes + 40

    def means(self) -> Float32:
        """Return the clusters' mean keys, ``[clusters, width]``."""
        return self._dequantize(np.s_[: self.clusters])

    def join(self, keys: Float32) -> tuple[Int64, list[int]]:
        """Add tokens to clusters. Return each token's cluster and the numbers of the blocks to drop.

        ``keys``: the tokens' keys in the deepest layer, ``[n, width]``.
        """
        joined, dropped = np.zeros(len(keys), np.int64), list[int]()
        unit = np.zeros(self.codes.shape, np.float32)  # the means, scaled to length 1
        unit[: self.clusters] = normalized(self.means())
        own = normalized(keys)
        cosine = own @ unit.T  # [n, capacity], updated as the clusters change
        for token, similar in enumerate(cosine):
            if self.clusters == self.capacity and float(similar.max()) < self.tau:
                kept, gone, numbers = self._merge(unit)
                dropped += numbers
                joined[:token][joined[:token] == gone] = kept
                joined[:token][joined[:token] == self.clusters] = gone  # the last cluster has taken the merged cluster's slot
                cosine[:, [kept, gone]] = own @ unit[[kept, gone]].T
            at = int(similar[: self.clusters].argmax()) if self.clusters else 0
            if not self.clusters or float(similar[at]) < self.tau:
                at = self.clusters
                self.clusters += 1
                self.count[at], self.runs[at], self.rows[at], self.near[at] = 0, -1, 0, NO_COSINE
            self.count[at] += 1
            if self._move(at, keys[token], 1 / self.count[at], unit):
                cosine[:, at] = own @ unit[at]
                self._update_nearest(at, unit)
            joined[token] = at
        return joined, dropped

    def drop_run(self, number: int) -> list[int]:
        """Remove the run that contains a lost block. Return the run's block numbers, one per layer."""
        first = self.runs
        at = (first >= 0) & (first <= number) & (number < first + self._layers)
        gone = [block for start in first[at].tolist() for block in range(start, start + self._layers)]
        self.rows[at], self.runs[at] = 0, -1
        return gone

    def _merge(self, unit: Float32) -> tuple[int, int, list[int]]:
        one = int(self.near[: self.clusters].argmax())
        self.tau, self.merged = min(self.tau, float(self.near[one])), self.merged + 1
        one, other = sorted((one, int(self.nearest[one])))
        self.count[one] += self.count[other]
        self._move(one, self._dequantize(np.s_[other]), self.count[other] / self.count[one], unit)
        if self.runs[other].max() > self.runs[one].max():  # newer blocks have higher numbers
            self.sketch[one] = self.sketch[other]
        numbers = np.concatenate([self.runs[one], self.runs[other]])
        rows = np.concatenate([self.rows[one], self.rows[other]])
        *dropped, older, newer = np.argsort(numbers, kind="stable").tolist()
        self.runs[one], self.rows[one] = numbers[[older, newer]], rows[[older, newer]]
        self.clusters = last = self.clusters - 1
        for part in (*(getattr(self, name) for name in self.PARTS), unit):
            part[other] = part[last]
        nearest = self.nearest[:last]
        alone = np.flatnonzero((nearest == one) | (nearest == other)).tolist()
        nearest[nearest == last] = other
        for cluster in alone:
            self._find_nearest(cluster, unit)
        self._update_nearest(one, unit)
        return one, other, [first + layer for first in numbers[dropped].tolist() if first >= 0 for layer in range(self._layers)]

    def _update_nearest(self, at: int, unit: Float32) -> None:
        cosine, near, nearest = self._find_nearest(at, unit), self.near[: self.clusters], self.nearest[: self.clusters]
        farther = np.flatnonzero((nearest == at) & (cosine < near)).tolist()
        nearer = cosine > near
        nearer[at] = False
        near[nearer], nearest[nearer] = cosine[nearer], at
        for cluster in farther:
            if cluster != at:
                self._find_nearest(cluster, unit)

    def _find_nearest(self, at: int, unit: Float32) -> Float32:
        cosine: Float32 = unit[: self.clusters] @ unit[at]
        cosine[at] = NO_COSINE
        self.nearest[at] = cosine.argmax()
        self.near[at] = cosine[self.nearest[at]]
        return cosine

    def _move(self, at: int, key: Float32, fraction: float, unit: Float32) -> bool:
        mean = self._dequantize(np.s_[at])
        mean += np.float32(fraction) * (key - mean)
        parts = mean.reshape(self.scale.shape[1], -1)
        scale = np.minimum(np.abs(parts).max(1) / 127, np.finfo(np.float16).max).astype(np.float16)
        codes = parts / np.maximum(scale.astype(np.float32), np.float32(1e-30))[:, None]
        self.scale[at], self.codes[at] = scale, np.clip(np.rint(codes), -127, 127).ravel()
        before, unit[at] = unit[at].copy(), normalized(self._dequantize(np.s_[at]))
        return not np.array_equal(before, unit[at])

    def _dequantize(self, which: slice | int) -> Float32:
        scale = self.scale[which].astype(np.float32)
        numbers: Float32 = np.repeat(scale, self.codes.shape[1] // self.scale.shape[1], -1) * self.codes[which]
        return numbers


def _scales(width: int) -> int:
    return width // CODES if width % CODES == 0 else 1


class KeySketches(Stateful):
    """Compact sketches of keys for ranking tokens by a query. A sketch has two bits for each slow channel of a key.

    Slow channels belong to the rotary pairs with the lowest frequencies. Fast channels make several full turns within a stream,
    so they carry no content but would dominate the dot product. The first bit is the sign of z = (k - middle) / spread. The
    second bit is set if abs(z) exceeds STEP, the threshold for a normal variable (Max, 1960). ``middle``, ``spread``: each
    channel's mean and standard deviation over the first tokens, float16 ``[layers, kv_heads, 1, head_dim]``.
    """

    STEP, SMALL, LARGE = 0.9816, 0.4528, 1.5104

    state_fields = ("middle", "spread")
    _scratch_fields = ("_slow",)

    def __init__(self, layers: int, heads: int, inv_freq: NDArray[np.float64]) -> None:
        pairs = np.sort(np.argsort(inv_freq, kind="stable")[: (len(inv_freq) + 1) // 2])
        self._slow = np.concatenate([pairs, pairs + len(inv_freq)])
        self.middle, self.spread = np.zeros((2, layers, heads, 1, 2 * len(inv_freq)), np.float16)
        self.bytes = layers * heads * 2 * -(-len(self._slow) // 8)  # size of one token's sketch

    def fit(self, layer: int, keys: Float32) -> None:
        """Compute the mean and the standard deviation of each channel of a layer. ``keys``: ``[kv_heads, n, head_dim]``."""
        self.middle[layer], self.spread[layer] = keys.mean(1, keepdims=True), keys.std(1, keepdims=True) + np.float32(1e-3)

    def normal(self, keys: Float32) -> Float32:
        """Centre and scale each channel of the deepest layer's keys.

        Returns float32 ``[n, width + 1]``. The last channel is a constant that is roughly as large as the norm of the other
        channels. Without this channel, keys near the mean would look dissimilar, because their directions are random. Raw keys
        share a large mean, so their cosines would all be near 1. ``keys``: ``[kv_heads, n, head_dim]``.
        """
        z = ((keys - self.middle[-1]) / self.spread[-1]).swapaxes(0, 1).reshape(keys.shape[1], -1)
        return np.pad(z, ((0, 0), (0, 1)), constant_values=np.sqrt(z.shape[1]))

    def of(self, keys: Float32) -> NDArray[np.uint8]:
        """Return tokens' sketches, ``[n, bytes]``. ``keys``: un-rotated, ``[layers, kv_heads, n, head_dim]``."""
        z = ((keys - self.middle) / self.spread)[..., self._slow]
        bits = np.packbits(np.stack([z > 0, np.abs(z) > self.STEP], -2), -1)  # [layers, kv_heads, n, 2, bytes]
        return np.moveaxis(bits, 2, 0).reshape(keys.shape[2], -1)

    def logits(self, sketches: NDArray[np.uint8], layer: int, head: int, query: Float32) -> Float32:
        """Estimate the dot products of queries and keys from the keys' sketches, up to a constant per query.

        ``query``: un-rotated, ``[S, head_dim]``. Returns ``[S, n]``.
        """
        layers, heads, slow = *self.middle.shape[:2], len(self._slow)
        bits = np.unpackbits(sketches.reshape(len(sketches), layers, heads, 2, -1)[:, layer, head], axis=-1, count=slow)
        sign, large = bits.swapaxes(0, 1).astype(np.float32)
        levels = (2 * sign - 1) * (np.float32(self.SMALL) + np.float32(self.LARGE - self.SMALL) * large)
        product: Float32 = (query * self.spread[layer, head])[:, self._slow] @ levels.T
        return product


@dataclass
class Hybrid(QuestionRetrieval):
    """Evict like ``last-seen``, store the newest evicted tokens of each cluster, and fetch the best clusters for a question.

    For a question, each layer and KV head fetches the clusters c with the largest softmax_c(q . k_c / sqrt(D)), summed over the
    KV head's query heads. Here q is the query of the question's last token, and k_c the sketch of the cluster's newest key.

    Ours: there is no paper.
    """

    window: float = setting(0.65, "fraction of |M| for tokens kept in the cache, as last-seen does", above=0, below=1)
    index: float = setting(
        0.15, "fraction of |M|, in fp32 bytes, for the cluster index; the rest is the working set", above=0, below=1
    )
    rows: int = setting(2, "maximum number of tokens per block; each cluster keeps two blocks", at_least=1)
    tau: float = setting(0.95, "minimum cosine similarity for joining a cluster, until the index is full", above=0, at_most=1)

    name: ClassVar[str] = "hybrid"
    paper: ClassVar[str] = "ours, docs/internals/long-streams.md"
    state_fields = (*QuestionRetrieval.state_fields, "_clusters", "_sketches")

    arena_policy = LastSeen

    def open(self, cache: KVCache, store: Store) -> None:
        super().open(cache, store)
        self._sketches = made = KeySketches(cache.layers, cache.kv_heads, cache.inv_freq)
        width = cache.kv_heads * cache.head_dim + 1
        self._clusters = ClusterIndex(cache.layers, width, made.bytes, self.index_bytes - bytes_of(made), self.tau)
        if self._clusters.capacity < 2:
            raise self.no_room("two clusters")

    def take_in(self, blocks: Sequence[Block]) -> None:
        """Add evicted tokens (the same in every layer) to clusters, and store each cluster's newest tokens."""
        cache, keys = self.cache, np.stack([unrotated_keys(self.cache, layer, block) for layer, block in enumerate(blocks)])
        if not self._sketches.spread.any():
            for layer in range(cache.layers):
                held = block_of(cache, layer, by_seq(cache, layer, cache.kind(layer) == Kind.VISION))
                self._sketches.fit(layer, unrotated_keys(cache, layer, held))
        clusters, dropped = self._clusters.join(self._sketches.normal(keys[-1]))
        sketches = self._sketches.of(keys)
        for cluster in np.unique(clusters).tolist():
            newest = np.flatnonzero(clusters == cluster)[-self.rows :]
            self._clusters.sketch[cluster] = sketches[newest[-1]]
            dropped += self._extend(cluster, [block[newest] for block in blocks])
        self.store.drop(dropped)

    def _extend(self, cluster: int, parts: Sequence[Block]) -> Sequence[int]:
        runs, rows, count = self._clusters.runs[cluster], self._clusters.rows[cluster], len(parts[0])
        if runs[1] < 0 or rows[1] + count > self.rows:
            dropped = range(runs[0], runs[0] + len(parts)) if runs[0] >= 0 else range(0)
            numbers = [self.store.put(part) for part in parts]
            runs[:], rows[:] = (runs[1], numbers[0]), (rows[1], count)
            return dropped
        for layer, part in enumerate(parts):
            self.store.append(int(runs[1]) + layer, part)
        rows[1] += count
        return range(0)

    def forget_lost(self) -> None:
        """Remove runs that have lost a block, in all layers."""
        for number in self.store.lost():
            self.store.drop(self._clusters.drop_run(number))
            self.lost += 1

    def rank(self, layer: int, query: Float32) -> Chosen:
        """Return blocks that fill the working set: the best cluster first, and within a cluster the newest block first."""
        index, heads, width = self._clusters, self.cache.kv_heads, self.cache.head_dim
        ranked: list[list[int]] = []
        for head, asked in enumerate(query.reshape(heads, -1, query.shape[1], width)[:, :, -1]):
            logits = self._sketches.logits(index.sketch[: index.clusters], layer, head, asked) / np.float32(np.sqrt(width))
            weights = np.exp(logits - logits.max(1, keepdims=True))
            order = np.argsort(-(weights / weights.sum(1, keepdims=True)).sum(0), kind="stable")
            have = index.rows[order].sum(1).cumsum()
            first = index.runs[order[: int(np.searchsorted(have, self.working_rows)) + 1], ::-1].ravel()
            ranked.append((first[first >= 0] + layer).tolist())
        return ranked

    @property
    def merged(self) -> int:
        """The number of clusters that were merged into another cluster because the index was full."""
        return self._clusters.merged

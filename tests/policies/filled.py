"""A cache filled with frames of a small moving grid, as an engine would: what the tests of every policy stand on."""

from dataclasses import replace

import numpy as np
from cuda_backend import backend, memory
from reference import rotate

from edgevlm.runtime.cache import Kind, Rows
from edgevlm.runtime.kv import KVScales, codes
from edgevlm.runtime.policies import Appended, layers_of

HEADS, DIM, PREFIX = 2, 8, 3  # KV heads, head size, rows of the prefix
GROUP = 2  # query heads of a KV head
INV_FREQ = 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
SECTIONS = (2, 1, 1)  # rotary pairs that turn by frame, row and column under M-RoPE
PAIR_AXIS = np.array([0, 0, 1, 2], np.uint8)
STORAGE = [(dtype, axes) for axes in (1, 3) for dtype in ("fp32", "fp16", "int8")]  # dtype of the cache, axes of its positions


def scales(layers, heads=HEADS, dim=DIM):
    """Scales that hold normal numbers as keys and twice as large ones as values, another for each channel."""
    random = np.random.default_rng(11)
    longest, largest = (random.uniform(*span, (layers, heads, width)) for span, width in (((6, 9), dim // 2), ((10, 14), dim)))
    return KVScales(*((part / 127).astype(np.float32) for part in (np.concatenate([longest] * 2, -1), largest)))


def turned(x, position):
    """Rotate ``x [..., DIM]`` to ``position``: ``[...]``, or ``[..., 3]`` for M-RoPE. In float64."""
    position = np.asarray(position)
    three = position.ndim == np.ndim(x)
    return rotate(x, position, INV_FREQ, PAIR_AXIS) if three else rotate(x, position, INV_FREQ)


def rows_of(kind, seq, frame, row, col, position):
    """Rows at ``position`` ``[n]`` or ``[n, axes]``."""
    return Rows(
        kind=np.full(len(seq), kind, np.uint8),
        seq=np.asarray(seq, np.int64),
        frame=np.asarray(frame, np.int32),
        row=np.asarray(row, np.int16),
        col=np.asarray(col, np.int16),
        position=np.asarray(position, np.int32).reshape(len(seq), -1),
    )


class Filled:
    """A cache that frames of a small moving grid are appended to, as an engine would.

    ``frame()`` returns what a policy is told of it, queries of every layer included; ``bare`` keeps those before their rotary
    embedding by layer and seq, ``[query heads, DIM]``, for references. With 3 axes frames count on from ``position``, where
    the video, or what follows a re-indexing, starts; text has the same position on every axis.
    """

    kv, where = "fp32", "cpu"  # of caches whose dtype is not named; where they lie

    def __init__(self, layers, capacity, grid, random, dtype=None, axes=1):
        dtype = dtype or self.kv
        sections = SECTIONS if axes == 3 else None
        self.cache = backend("cpu" if dtype == "int8" else self.where)(
            layers, HEADS, DIM, capacity + PREFIX, inv_freq=INV_FREQ, axes=axes, dtype=dtype, sections=sections,
            scales=scales(layers) if dtype == "int8" else None,
        )  # fmt: skip
        self.grid, self.random, self.frames, self.seq, self.position = grid, random, 0, 0, 0
        self.next, self.first = 0, 0  # 1 + the largest position; with 3 axes the frame that stands at ``position``
        self.noise = 0.3
        self.query_random, self.bare = np.random.default_rng(7), [{} for _ in range(layers)]
        self.base = random.normal(size=(layers, HEADS, grid[0] * grid[1], DIM))
        self.append(
            Kind.PREFIX,
            PREFIX,
            [-1] * PREFIX,
            [0] * PREFIX,
            [0] * PREFIX,
            random.normal(size=(layers, HEADS, PREFIX, DIM)),
        )

    def append(self, kind, count, frame, row, col, content):
        seq, position = np.arange(self.seq, self.seq + count), self.positions(kind, count, frame, row, col)
        self.cache.reserve(count)
        for layer, (key, value) in enumerate(zip(self.rotated(content, position), 2 * content, strict=True)):
            write(self.cache, layer, key, value)
        rows = rows_of(kind, seq, frame, row, col, position)
        self.cache.commit(rows)
        self.seq += count
        self.next = int(np.max(position, initial=self.next - 1)) + 1
        if self.cache.axes == 1 or kind != Kind.VISION:
            self.position = self.next
        return Appended(rows.seq, rows.position, self.queries(rows.seq, position))

    def positions(self, kind, count, frame, row, col):
        """Of new rows: the next indices, ``[n]``, or with 3 axes frame, row and column from the video's start, ``[n, 3]``."""
        if self.cache.axes == 1:
            return np.arange(self.position, self.position + count)
        if kind != Kind.VISION:
            return np.repeat(np.arange(self.next, self.next + count)[:, None], 3, 1)
        return self.position + np.stack([np.asarray(frame) - self.first, row, col], 1)

    def rotated(self, x, position):
        """``x [..., n, DIM]`` turned to positions ``[n]`` or ``[n, 3]``."""
        return turned(x, np.broadcast_to(position, (*x.shape[:-1], *position.shape[1:])))

    def queries(self, seq, position):
        """Random queries of new rows in every layer, rotated: ``[query heads, n, DIM]``."""
        bare = self.query_random.normal(size=(self.cache.layers, HEADS * GROUP, len(seq), DIM))
        for layer, queries in enumerate(bare):
            self.bare[layer].update(zip(seq.tolist(), queries.transpose(1, 0, 2), strict=True))
        return dict(enumerate(self.rotated(bare, position).astype(np.float32)))

    def reindex(self):
        """Make positions dense, as a session does: the next rows go on from the largest."""
        self.position = self.next = self.cache.reindex(PREFIX)
        self.first = self.frames

    def lose(self, layer, count):
        """Take the ``count`` oldest vision rows out of each head of one layer."""
        keep = [np.ones((HEADS, int(n)), bool) for n in self.cache.lengths]
        np.put_along_axis(keep[layer], np.argsort(self.cache.seq(layer), 1)[:, PREFIX : PREFIX + count], False, 1)
        self.cache.evict(keep)

    def frame(self, noise=None, count=1):
        """Append ``count`` frames at once, of ``self.noise`` or another."""
        noise = self.noise if noise is None else noise
        rows, cols = self.grid
        content = np.concatenate([self.base + noise * self.random.normal(size=self.base.shape) for _ in range(count)], 2)
        row, col = np.divmod(np.tile(np.arange(rows * cols), count), cols)
        frame = np.repeat(np.arange(self.frames, self.frames + count), rows * cols)
        appended = self.append(Kind.VISION, len(frame), frame, row, col, content)
        self.frames += count
        return appended

    def heads(self, layer, kinds=(Kind.VISION,)):
        """The vision tokens of a layer, or those of ``kinds``, as the references want them."""
        cache = self.cache
        key, value = (cache.dequantize(part, layer) for part in ("key", "value"))
        return [
            [
                {
                    "seq": int(cache.seq(layer)[h, s]),
                    "frame": int(cache.frame(layer)[h, s]),
                    "row": int(cache.row(layer)[h, s]),
                    "col": int(cache.col(layer)[h, s]),
                    "position": cache.position(layer)[h, s].copy() if cache.axes > 1 else int(cache.position(layer)[h, s, 0]),
                    "key": key[h, s],
                    "value": value[h, s],
                }
                for s in range(cache.lengths[layer])
                if cache.kind(layer)[h, s] in kinds
            ]
            for h in range(HEADS)
        ]


def play(filled, policy, pieces, expected, appended=lambda layer, rows: None, reindex_every=3):
    """Append pieces of so many frames as a session does; every compression must keep what ``expected`` says.

    ``expected(layer, target)``: the vision seqs that each head keeps; ``appended(layer, seqs)`` tells the reference of new
    rows. Re-indexes at every ``reindex_every``-th compression. Returns the compressions.
    """
    cache, per_frame, compressions = filled.cache, filled.grid[0] * filled.grid[1], 0
    for frames in pieces:
        rows = frames * per_frame
        plan = policy.before_append(cache, rows, None)
        if plan is not None:
            target = max(0, min(policy.compress_to, policy.budget - rows))
            for layer, mask in enumerate(plan.keep):
                if mask is None:
                    assert cache.lengths[layer] - PREFIX <= target
                else:
                    check(cache, layer, mask, target, expected(layer, target))
            cache.evict(plan.keep)
            compressions += 1
            if compressions % reindex_every == 0:
                filled.reindex()
        assert np.all(cache.lengths - PREFIX + rows <= max(policy.budget, rows)), "the cap holds"
        news = filled.frame(count=frames)
        policy.after_append(layers_of(cache), told(policy, news))
        for layer in range(cache.layers):
            appended(layer, news.seq.tolist())
    return compressions


def told(policy, news):
    """What a session tells the policy: the queries of no more layers than it asked for."""
    return replace(news, queries={layer: news.queries[layer] for layer in policy.needs.probe_layers})


def check(cache, layer, mask, target, expected):
    """The mask of one layer keeps the prefix and, of the vision tokens, just the expected."""
    for head in range(cache.kv_heads):
        vision = cache.kind(layer)[head] == Kind.VISION
        assert mask[head][~vision].all(), "the prefix stays"
        kept = cache.seq(layer)[head][mask[head] & vision].tolist()
        assert len(kept) == target
        assert sorted(kept) == sorted(expected[head])


def write(cache, layer, key, value):
    """Write the reserved rows of a layer through its addresses, as an engine does: [Hkv, n, D]."""
    buffer = cache.buffers()[layer]
    start, count = int(cache.lengths[layer]), key.shape[1]
    if buffer.dtype == np.int8:
        key, value = codes(key, buffer.key_scale), codes(value, buffer.value_scale)
    for window, rows in zip(memory(buffer), (key, value), strict=True):
        window[:, start : start + count] = rows

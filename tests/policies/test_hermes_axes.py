"""HERMES on caches of one and three axes and of every precision: the summary against the float64 mean of what it stands for."""

import numpy as np
import pytest
from policies.filled import INV_FREQ, PREFIX, scales
from reference import rotate

from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.policies import Guidance, StreamShape, create_policy

HEADS, DIM, LAYERS, GRID = 2, 8, 10, (2, 3)
PER_FRAME = GRID[0] * GRID[1]
LAYOUTS = {
    "1-D": {},
    "sections": {"axes": 3, "sections": (1, 1, 2)},
    "interleaved": {"axes": 3, "sections": (2, 1, 1), "interleaved": True},
}
ERROR = {"fp32": 2e-5, "fp16": 2e-2, "int8": 0.25}  # int8: a step and a half of rounding, turned


def kept_as(dtype):
    return scales(LAYERS) if dtype == "int8" else None


class Video:
    """Random frames in a cache of any axes: rows and columns count from where the video, or what is left of it, starts."""

    def __init__(self, dtype, layout, seed=0):
        self.cache = KVCache(LAYERS, HEADS, DIM, 80, inv_freq=INV_FREQ, dtype=dtype, **layout, scales=kept_as(dtype))
        self.random, self.frames, self.seq, self.start, self.step = np.random.default_rng(seed), 0, 0, PREFIX, 0
        self.append(Kind.PREFIX, np.repeat(np.arange(PREFIX)[:, None], self.cache.axes, 1), [-1] * PREFIX)

    def append(self, kind, position, frame):
        """Rows that are the same tokens in every layer, written one layer at a time."""
        seq = self.seq + np.arange(len(position))
        zeros = np.zeros(len(seq), np.int16)
        rows = Rows(np.full(len(seq), kind, np.uint8), seq, np.array(frame, np.int32), zeros, zeros, position.astype(np.int32))
        for layer in range(LAYERS):
            key, value = self.random.normal(size=(2, HEADS, len(seq), DIM)).astype(np.float32)
            self.cache.append(layer, key, value, rows)
        self.seq += len(seq)

    def frame(self):
        row, col = np.divmod(np.arange(PER_FRAME), GRID[1])
        if self.cache.axes == 1:
            position = (self.start + np.arange(PER_FRAME))[:, None]
            self.start += PER_FRAME
        else:
            position = self.start + np.stack([np.full(PER_FRAME, self.step), row, col], 1)
            self.step += 1
        self.append(Kind.VISION, position, [self.frames] * PER_FRAME)
        self.frames += 1

    def reindex(self):
        self.start, self.step = self.cache.reindex(PREFIX), 0

    def bare(self, layer, rows):
        """Keys and values of ``rows`` without their rotary embedding, float64 ``[HEADS, m, DIM]``."""
        cache = self.cache
        position = cache.position(layer)[:, rows]
        at = position[..., 0] if cache.pair_axis is None else position
        key, value = (cache.dequantize(part, layer, rows) for part in ("key", "value"))
        return rotate(key, -at, INV_FREQ, cache.pair_axis), value.astype(float)


def guide(random):
    def run():
        layers = range(1, LAYERS)
        queries = {layer: random.normal(size=(2 * HEADS, 5, DIM)).astype(np.float32) for layer in layers}
        return Guidance(queries, {layer: queries[layer][:HEADS] for layer in layers}, (3, 2))

    return run


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_summary_stands_for_all_that_went_whatever_the_axes(dtype, layout):
    """Over five compressions with a re-indexing between any two: place of the newest, mean of keys turned to it."""
    video = Video(dtype, LAYOUTS[layout])
    cache, policy, gone = video.cache, create_policy("hermes"), {layer: [] for layer in (7, 8, 9)}
    policy.attach(4 * PER_FRAME, StreamShape(LAYERS, PER_FRAME, PREFIX))
    places = set()
    for _ in range(9):
        plan = policy.before_append(cache, PER_FRAME, guide(video.random))
        for layer, new in plan.add.items() if plan else ():
            out = ~plan.keep[layer][0]
            vision = np.flatnonzero(out & (cache.kind(layer)[0] == Kind.VISION))
            gone[layer].append(video.bare(layer, vision))
            newest = int(np.flatnonzero(out)[np.argmax(cache.seq(layer)[0, out])])
            assert new.rows.position.tolist() == [cache.position(layer)[0, newest].tolist()]
            places.add(tuple(new.rows.position[0].tolist()))
            key, value = (np.concatenate(parts, 1).mean(1) for parts in zip(*gone[layer], strict=True))
            at = new.rows.position[0, 0] if cache.pair_axis is None else new.rows.position[0]
            np.testing.assert_allclose(new.key[:, 0], rotate(key, at, INV_FREQ, cache.pair_axis), atol=ERROR[dtype])
            np.testing.assert_allclose(new.value[:, 0], value, atol=ERROR[dtype])
        if plan:
            cache.evict(plan.keep)
            for layer, new in plan.add.items():
                cache.append(layer, new.key, new.value, new.rows)
            video.reindex()
        video.frame()
    assert all(len(parts) == 5 for parts in gone.values())
    assert layout == "1-D" or any(len(set(place)) > 1 for place in places), "axes that differ"

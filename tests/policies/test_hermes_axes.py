"""HERMES on caches of one and three axes and of every precision: the summary against the float64 mean of what it stands for."""

import numpy as np
import pytest
from policies.filled import GROUP, HEADS, PREFIX, STORAGE, Filled, turned

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import Guidance, StreamShape, create_policy

LAYERS, GRID = 10, (2, 3)
PER_FRAME = GRID[0] * GRID[1]
ERROR = {"fp32": 2e-5, "fp16": 2e-2, "int8": 0.25}  # int8: a step and a half of rounding, turned


def guide(random):
    def run():
        queries = {layer: random.normal(size=(HEADS * GROUP, 5, 8)).astype(np.float32) for layer in range(1, LAYERS)}
        return Guidance(queries, {layer: of[:HEADS] for layer, of in queries.items()}, (3, 2))

    return run


def placed(cache, layer, rows):
    """Positions of rows in all heads, as ``turned`` wants them."""
    position = cache.position(layer)[:, rows]
    return position if cache.axes == 3 else position[..., 0]


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_a_summary_stands_for_all_that_went_whatever_the_axes(dtype, axes):
    """Over five compressions with a re-indexing between any two: place of the newest, mean of keys turned to it."""
    filled, policy = Filled(LAYERS, 80, GRID, np.random.default_rng(0), dtype, axes), create_policy("hermes")
    filled.noise, filled.base = 0.5, 0.5 * filled.base
    cache, gone, places = filled.cache, {layer: [] for layer in (7, 8, 9)}, set()
    policy.attach(4 * PER_FRAME, StreamShape(LAYERS, PER_FRAME, PREFIX))
    for _ in range(9):
        plan = policy.before_append(cache, PER_FRAME, guide(filled.random))
        for layer, new in plan.add.items() if plan else ():
            out = ~plan.keep[layer][0]
            vision = np.flatnonzero(out & (cache.kind(layer)[0] == Kind.VISION))
            key, value = (cache.dequantize(part, layer, vision).astype(float) for part in ("key", "value"))
            gone[layer].append((turned(key, -placed(cache, layer, vision)), value))
            newest = int(np.flatnonzero(out)[np.argmax(cache.seq(layer)[0, out])])
            assert new.rows.position.tolist() == [cache.position(layer)[0, newest].tolist()]
            places.add(tuple(new.rows.position[0].tolist()))
            key, value = (np.concatenate(parts, 1).mean(1) for parts in zip(*gone[layer], strict=True))
            np.testing.assert_allclose(new.key[:, 0], turned(key, placed(cache, layer, newest)), atol=ERROR[dtype])
            np.testing.assert_allclose(new.value[:, 0], value, atol=ERROR[dtype])
        if plan:
            plan.carry_out(cache)
            filled.reindex()
        filled.frame()
    assert all(len(parts) == 5 for parts in gone.values())
    assert axes == 1 or any(len(set(place)) > 1 for place in places), "axes that differ"

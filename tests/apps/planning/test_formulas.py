"""The formulas of a plan are those of slow sums, of what an export stores and of what a cache allocates."""

from dataclasses import replace

import numpy as np
import pytest
from planned import MODEL, SMALL, roofline

from edgevlm.apps.planning.formulas import COMPUTE_EFFICIENCY, arena_bytes
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.kv import KV_TYPES, KVScales
from edgevlm.runtime.plugins import names

# Memory.


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("model", [MODEL, replace(SMALL, axes=1)])
def test_the_arena_is_the_one_that_a_cache_would_allocate(kv, model):
    small = replace(model, layers=2, limit=2048)
    capacity = small.prefix + 600 + 3 * 128 + small.closing
    cache = KVCache(
        2, small.kv_heads, small.head_dim, capacity, inv_freq=np.ones(64), axes=small.axes, dtype=kv, scales=ones(small, kv)
    )
    assert arena_bytes(small, 600, kv) == cache.nbytes


def ones(model, kv):
    """Scales of an int8 cache of two layers; None for others."""
    return KVScales(*np.ones((2, 2, model.kv_heads, model.head_dim), np.float32)) if kv == "int8" else None


@pytest.mark.parametrize("name", names("precisions"))
def test_bytes_of_a_weight_are_those_that_an_export_stores(name):
    """A layout's count beside what it writes: one that is wrong is noticed here. Of 4 bits numpy keeps one number a byte."""
    precision = load_precision(name)
    for layout in (*precision.onnxruntime[:2], *(precision.tensorrt or ())[:2]):
        parts = layout.parts(np.ones((8, 2048), np.float32))
        stored = sum(part.nbytes // (1 + (part.dtype.name == "int4")) for part in parts.values())
        assert stored == pytest.approx(8 * 2048 * layout.bytes_per_weight(), rel=0.005), layout


# Speed, against sums written out.


def test_a_prefill_takes_as_long_as_its_products():
    held, count = 500, 292
    operations = 0.0
    for row in range(count):
        operations += 2 * SMALL.matrices
        operations += sum(4 * SMALL.heads * SMALL.head_dim * (held + row + 0.5) for _ in range(SMALL.layers))
    operations += 2 * SMALL.vocab * SMALL.hidden
    call = roofline().prefill(count, held, logits=True)
    assert call.term == "compute"
    assert call.seconds == pytest.approx(operations / (15e12 * COMPUTE_EFFICIENCY))

"""The formulas of a plan are those of slow sums, of what an export stores and of what a cache allocates."""

from dataclasses import replace

import numpy as np
import pytest
from planned import MODEL, SMALL, roofline, with_figures

from edgevlm.apps.planning.memory import (
    arena_bytes,
    weights_of,
)
from edgevlm.apps.planning.speed import COMPUTE_EFFICIENCY, speed_of
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.kv import KV_TYPES, KVScales
from edgevlm.runtime.plugins import names

# Only what changed.


def test_what_changes_costs_its_fraction_and_reads_the_weights_once_a_chunk():
    """Everything changing is a whole frame; in a still room a longer chunk spreads the read of the weights."""
    line = roofline("cpu", "int8", "fp32")
    rates = [speed_of(line, 6000, 8, changed).prefill_fps for changed in (1.0, 0.8, 0.25, 0.05, 0.0)]
    assert rates[0] == speed_of(line, 6000, 8).prefill_fps
    assert rates == sorted(rates)
    quarter, whole = speed_of(line, 6000, 8, 0.25), speed_of(line, 6000, 8)
    assert quarter.vision_ms == pytest.approx(whole.vision_ms / 4)
    assert speed_of(line, 6000, 8, 0.8).vision_ms == whole.vision_ms
    slow = replace(line, device=with_figures(line.device, bandwidth_gb_s=1))  # reading is what takes long
    still = [speed_of(slow, 6000, chunk, 0.0).prefill_ms * line.model.tower.group for chunk in (2, 8)]
    read = 1e3 * (weights_of(line.model, "int8", "cpu").layers + slow.kv_bytes(line.model.prefix + 6000)) / slow.bandwidth
    assert still[0] - still[1] == pytest.approx(read * 3 / 4, rel=0.01)


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
    for layout in (*precision.onnxruntime, *(precision.tensorrt or ())):
        parts = layout.parts(np.ones((8, 512), np.float32))
        stored = sum(part.nbytes // (1 + (part.dtype.name == "int4")) for part in parts.values())
        assert stored == pytest.approx(8 * 512 * layout.bytes_per_weight(), rel=0.005), layout


def test_a_rounded_bundle_can_only_be_planned_as_it_is():
    files = {"decoder": 100, "embedding": 20, "vision": 30}
    bundle = replace(MODEL, files=files, precision="int8")
    assert weights_of(bundle, "int8", "cpu").total == 150
    assert weights_of(bundle, "int8", "jetson") == weights_of(replace(MODEL, precision="int8"), "int8", "jetson")
    for kind in ("cpu", "jetson"):
        with pytest.raises(UserError, match="is a bundle of int8 weights; leave --precision out, or plan its checkpoint"):
            weights_of(bundle, "int4", kind)


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

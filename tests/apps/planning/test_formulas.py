"""The formulas of a plan are those of slow sums, of what an export stores and of what a cache allocates."""

from dataclasses import replace

import numpy as np
import pytest
from planned import MODEL, SMALL, make_line, roofline, with_figures

from edgevlm.apps.planning.memory import (
    arena_bytes,
    weights_of,
)
from edgevlm.apps.planning.speed import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, QUESTION, speed_of
from edgevlm.engines.devices import load_device
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


def test_a_camera_keeps_a_frame_its_references_and_the_towers_keys():
    tower, tokens = SMALL.tower, SMALL.tower.tokens
    features = np.zeros((2, tokens, SMALL.hidden * (1 + SMALL.deepstack)), np.float32).nbytes
    rows = arena_bytes(SMALL, 6000 + tower.rows, "fp16") - arena_bytes(SMALL, 6000, "fp16")
    line = make_line(device="orin-nx-16", precision="int4", kv="fp16", budget=6000, changed=0.1)
    assert line["present_mb"] == round((features + rows) / 1e6, 1)
    keys = np.zeros((2, tower.blocks, tower.patches, tower.width), np.float32).nbytes
    assert line["tower_cache_mb"] == pytest.approx((keys + 4 * tower.patches * tower.width) / 1e6, abs=0.05)
    assert line["changed"] == 0.1
    assert line["changed_fps"] > line["prefill_fps"]
    assert make_line(device="orin-nx-16", budget=6000, changed=1.0)["changed_fps"] == pytest.approx(
        make_line(device="orin-nx-16", budget=6000)["prefill_fps"]
    )


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


def test_a_token_takes_as_long_as_its_bytes_take_to_be_read():
    device, weights, held = load_device("orin-nx-16"), weights_of(SMALL, "int4", "jetson"), 1000
    cache = sum(2 * SMALL.kv_heads * SMALL.head_dim * 2 * held for _ in range(SMALL.layers))
    seconds = (weights.layers + weights.embedding + cache) / (device["bandwidth_gb_s"] * 1e9 * BANDWIDTH_EFFICIENCY)
    call = roofline().token(held)
    assert call.term == "memory bandwidth"
    assert call.seconds == pytest.approx(seconds)


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


def test_a_tower_takes_as_long_as_its_products():
    tower = SMALL.tower
    block = 4 * 1024 * 1024 + 2 * 1024 * 4096 + 4 * 1024 + 4096 + 1024
    pairs = 2 * 2 * tower.patches * tower.patches * 1024
    merger = 4096 * 4096 + 4096 + 4096 * 2048 + 2048
    operations = 24 * (2 * block * tower.patches + pairs) + 2 * 4 * merger * tower.tokens
    assert roofline().vision().seconds == pytest.approx(operations / (15e12 * COMPUTE_EFFICIENCY))


def test_a_frame_is_its_share_of_a_grid_and_energy_its_time_at_full_power():
    line = roofline()
    speed = speed_of(line, 6000, 8)
    parts = speed.vision_ms + speed.prefill_ms + speed.compression_ms
    assert 1e3 / speed.prefill_fps == pytest.approx(parts)
    assert speed.vision_ms == pytest.approx(1e3 * line.vision().seconds / 2)
    assert speed.j_per_frame == pytest.approx(25 / speed.prefill_fps)
    assert speed.ttft_ms == pytest.approx(1e3 * line.prefill(QUESTION, 6000 + SMALL.prefix, logits=True).seconds)

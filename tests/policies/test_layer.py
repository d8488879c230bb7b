"""A layer's view beside plain numpy in float64: keys without their rotation, times, and what a merge leaves in the memory."""

from dataclasses import dataclass

import numpy as np
import pytest
from policies.filled import HEADS, PREFIX, STORAGE, Filled, turned

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.evidence import FrameTimes
from edgevlm.runtime.policies import Policy, StreamShape
from edgevlm.runtime.policies.layer import Compression, Layer

ERROR = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.2}


def filled_with(dtype, axes, frames=4):
    filled = Filled(2, 24, (2, 2), np.random.default_rng(0), dtype, axes)
    for _ in range(frames):
        filled.frame()
    return filled


def at(layer):
    position = layer.cache.position(layer.index)
    return position if layer.cache.axes == 3 else position[..., 0]


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_keys_are_those_before_rotation_and_times_those_of_their_frames(dtype, axes):
    filled, times = filled_with(dtype, axes), FrameTimes()
    for frame in range(4):
        times.add(frame, 3 + 0.5 * frame)
    layer = Layer(filled.cache, 1, shared=Compression(times=times))
    np.testing.assert_allclose(turned(layer.keys, at(layer)), filled.cache.dequantize("key", 1), atol=2e-6)
    assert (layer.time[layer.free] == 3 + 0.5 * layer.frame[layer.free]).all()
    assert not layer.time[layer.frame < 0].any()
    assert layer.fixed.sum(1).tolist() == [PREFIX] * HEADS


@dataclass
class IntoNewest(Policy):
    """Merges the oldest rows into the newest even and the newest odd one; every row counts its seq."""

    def compress(self, layer):
        gone = layer.free & ~layer.newest(layer.target)
        newest = np.stack([layer.newest(1, layer.free & (layer.seq % 2 == odd)).argmax(1) for odd in (0, 1)], 1)
        layer.merge(gone, np.take_along_axis(newest, layer.seq % 2, 1), layer.seq.astype(float))


@pytest.mark.parametrize(("dtype", "axes"), STORAGE)
def test_a_merged_row_is_the_weighted_mean_of_keys_and_values_at_its_own_place(dtype, axes):
    filled, policy = filled_with(dtype, axes), IntoNewest()
    policy.attach(16, StreamShape(2, 4, PREFIX))
    cache, before = filled.cache, [filled.heads(layer) for layer in range(2)]
    policy.before_append(cache, 6, None).carry_out(cache)
    for layer in range(2):
        for then, now in zip(before[layer], filled.heads(layer), strict=True):
            then, newest = {row["seq"]: row for row in then}, max(row["seq"] for row in then)
            gone = sorted(then)[:6]
            assert [row["seq"] for row in sorted(now, key=lambda row: row["seq"])] == sorted(then)[6:]
            for row in now:
                same = then[row["seq"]]
                assert row["frame"] == same["frame"]
                if row["seq"] < newest - 1:
                    assert (row["key"] == same["key"]).all(), "not a bit of another row changes"
                    continue
                taken = [then[seq] for seq in [*gone, row["seq"]] if (seq - row["seq"]) % 2 == 0]
                weights = np.array([one["seq"] for one in taken], float)
                mean = {"value": 0, "key": 0}
                for one, weight in zip(taken, weights / weights.sum(), strict=True):
                    mean["value"] += weight * one["value"]
                    mean["key"] += weight * turned(one["key"].astype(float), -np.asarray(one["position"]))
                np.testing.assert_allclose(row["value"], mean["value"], atol=2 * ERROR[dtype])
                np.testing.assert_allclose(row["key"], turned(mean["key"], row["position"]), atol=ERROR[dtype])


@pytest.mark.parametrize("into", [0, -1, 99], ids=["fixed", "below", "beyond"])
def test_a_merge_into_a_row_that_does_not_stay_is_refused(into):
    layer = Layer(filled_with("fp32", 1).cache, 0, target=4)
    with pytest.raises(ValueError, match="layer 0, KV head 0, `into` refers to a row that is evicted or fixed"):
        layer.merge(layer.free & ~layer.newest(4), np.full(layer.seq.shape, into))
    assert (layer.kind == Kind.PREFIX).sum() == HEADS * PREFIX


def test_a_merge_by_weights_of_zero_is_refused():
    layer = Layer(filled_with("fp32", 1).cache, 0, target=4)
    newest = layer.newest(1).argmax(1)[:, None].repeat(layer.seq.shape[1], 1)
    with pytest.raises(ValueError, match="layer 0, KV head 0, the sum of weights must be above 0"):
        layer.merge(layer.free & ~layer.newest(4), newest, 0.0)

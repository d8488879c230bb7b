"""The bench of a frame's time on tiny models: what it prints, and that it measures a full memory."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench.seeded import seeded_model
from edgevlm.bench.stream import breakdown as bench
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.runtime.policies import POLICIES

SHAPE = DecoderShape(
    layers=4, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=48, vocab=64, norm_eps=1e-6, rope_theta=1e4,
    model_limit=4096, tied=True,
)  # fmt: skip
BOUNDED = [name for name, policy in POLICIES.items() if policy.bounded]
FIELDS = ["bench", "model", "policy", "budget", "frames", "fps", "frame_ms", *bench.PARTS, "reindex_ms", "compress_fraction"]
FIELDS += ["frame_low", "frame_high", "fraction_low", "fraction_high", "cold_frame_ms", "threads", "predicted_fps"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = seeded_model(tmp_path_factory.mktemp("seeded"), SHAPE, 12, threads=1)
    yield model
    model.close()


def test_auto_is_measured_as_the_policy_it_is(model):
    assert bench.measure(model, "auto", 240, 9, lambda _: None)["policy"] == "infinipot-v"


@pytest.mark.parametrize("policy", BOUNDED)
def test_the_parts_of_a_frame(model, policy):
    line = bench.measure(model, policy, 240, 9, lambda _: None)
    assert list(line) == [name for name in FIELDS if name not in ("bench", "model", "threads", "predicted_fps")]
    assert (line["policy"], line["budget"], line["frames"], line["vision_ms"]) == (policy, 240, 16, None)
    parts = {name: line[name] for name in ("prefill_ms", "compress_ms", "guidance_ms", "reindex_ms")}
    assert min(parts["prefill_ms"], parts["compress_ms"], parts["reindex_ms"], line["cold_frame_ms"]) > 0
    assert (parts["guidance_ms"] > 0) == (policy == "hermes")
    assert line["frame_ms"] == pytest.approx(sum(parts.values()), abs=1e-3)
    assert line["fraction_low"] <= line["fraction_high"]
    assert line["frame_low"] <= line["frame_high"]
    assert line["compress_fraction"] == pytest.approx(parts["compress_ms"] / line["frame_ms"], abs=1e-3)


def test_a_memory_is_filled_with_noise_and_then_by_the_model(model):
    stream = bench.open_stream(model, "sliding-window", 240)
    watch = bench.DemoStream(model, stream)
    with model.engine.filling():
        watch.chunk()
        held = stream.cache.lengths[0]
        noise = stream.cache.value(0)[:, stream.prefix : held]
        assert noise.mean() == pytest.approx(0, abs=0.1)
        assert noise.std() == pytest.approx(1, abs=0.1)
    once = []
    for _ in range(2):  # the same row again: computed it is the same, as noise it would not be
        with stream.question():
            stream.append_text(np.ones((1, SHAPE.hidden), np.float32))
            once.append(stream.cache.value(0)[:, held].copy())
    np.testing.assert_array_equal(*once)
    assert stream.cache.row(0)[0, stream.prefix : held].max() == 2, "12 patches are a grid of 3 x 4"
    assert stream.cache.col(0)[0, stream.prefix : held].max() == 3


def test_the_command_on_the_demo():
    command = ["bench", "stream", "breakdown", "--model", "demo", "--policy", "infinipot-v", "--frames", "8", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    (line,) = map(json.loads, done.stdout.splitlines())
    assert [name for name in line if name != "schema"] == FIELDS
    assert line["model"] == "demo"
    assert line["frames"] in (8, 16), "whole cycles: a compression serves one chunk or two"
    assert line["vision_ms"] > 0
    assert line["predicted_fps"] > 1
    done = CliRunner().invoke(app, [*command, "--budget", "256"], catch_exceptions=False)
    head, row = done.stdout.splitlines()
    assert head.split()[:5] == ["model", "policy", "budget", "frame", "ms"]
    assert row.split()[:3] == ["demo", "infinipot-v", "256"]


def test_a_policy_that_never_compresses_is_refused():
    with pytest.raises(UserError, match="policy full never compresses; name one of "):
        list(bench.breakdown(["demo"], ["full"]))

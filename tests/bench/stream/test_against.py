"""`edgevlm bench stream against`: the torch baseline chooses, holds and answers as our policy does."""

import json

import numpy as np
import pytest
import torch
from parity.official import OfficialInfiniPotV
from policies.filled import PREFIX, Filled
from transformers import Qwen2Config, SiglipVisionConfig
from typer.testing import CliRunner

from edgevlm.bench import seeded
from edgevlm.bench.stream.against import OTHER, OURS, POLICY, baseline_of
from edgevlm.bench.stream.growth import QUESTION
from edgevlm.bench.stream.torch_baseline import chosen, load
from edgevlm.cli import app
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import StreamShape
from edgevlm.runtime.session import Session, TextBudget

SIDE = 15  # patches along a frame, 8 after pooling: windows of 7 and 5 patches see different ones


@pytest.mark.parametrize(("frames", "budget", "grid"), [(12, 8 * 64, (8, 8)), (10, 8 * 60, (6, 10)), (3, 64, (8, 8))])
def test_it_chooses_what_our_policy_chooses_of_the_same_keys(frames, budget, grid):
    per_frame, random = grid[0] * grid[1], np.random.default_rng(frames)
    filled = Filled(4, frames * per_frame, grid, random)
    filled.frame(count=frames)
    policy, cache = OfficialInfiniPotV(), filled.cache
    policy.attach(budget, StreamShape(4, per_frame, PREFIX))
    for layer, keep in enumerate(policy.before_append(cache, per_frame, None).keep):
        keys, values = (torch.from_numpy(cache.dequantize(part, layer)[:, PREFIX:]) for part in ("key", "value"))
        found = chosen(keys, values, budget, per_frame)
        for head, mask in enumerate(keep):
            assert (cache.kind(layer)[head, mask][:PREFIX] == Kind.PREFIX).all()
            assert found[head].tolist() == (np.flatnonzero(mask[PREFIX:])).tolist()
        assert found.shape == (2, min(policy.compress_to, budget - per_frame))


@pytest.fixture(scope="module")
def both(exported):
    """A session of a tiny checkpoint's bundle, and the checkpoint in transformers."""
    made = exported("llava_onevision", layers=4, side=SIDE, tied=True)
    model = Model.load(made.bundle, threads=1)
    torch.set_num_threads(1)
    yield model, {name: load(made.checkpoint, name) for name in ("eager", "sdpa")}
    model.close()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_stream_holds_and_says_what_ours_does(both, attention):
    model, theirs = both
    budget, random = 8 * 64, np.random.default_rng(3)
    with Session.open(model, policy=OfficialInfiniPotV(), budget=budget, chunk=4, text_budget=TextBudget(0, 64, 8)) as session:
        baseline = baseline_of(theirs[attention], session)
        ids = session._memory.conversations.prompt(None, QUESTION)
        for _ in range(5):
            pixels = [session.prepare(random.integers(0, 256, (60, 80, 3), np.uint8)) for _ in range(4)]
            for frame in pixels:
                session.watch(frame)
            baseline.watch(torch.from_numpy(np.stack([frame.values for frame in pixels])))
            assert session.stats.memory.compressions == baseline.compressions
            assert held_alike(session.cache, baseline) > 0.99
            before = baseline.held(0)[0].clone()
            answer = session.ask(QUESTION, max_tokens=6)
            answer.wait()
            said, ttft_ms, tpot_ms = baseline.ask(ids, 6)
            assert said == answer.token_ids
            assert len(said) > 1
            assert min(ttft_ms, tpot_ms) > 0
            assert torch.equal(baseline.held(0)[0], before), "a question leaves nothing"
        assert baseline.compressions == 6


def held_alike(cache, baseline):
    """Share of our rows whose key and value the baseline holds at the same place, by age."""
    same = []
    for layer in range(cache.layers):
        for part, theirs in zip(("key", "value"), baseline.held(layer), strict=True):
            order = np.argsort(cache.seq(layer), 1)
            ours = np.take_along_axis(cache.dequantize(part, layer), order[..., None], 1)
            assert ours.shape == theirs.shape
            same.append((np.abs(ours - theirs.numpy()).max(-1) < 1e-3).mean())
    return np.mean(same)


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


def tiny_config():
    """LLaVA-OneVision's configuration, of a smaller shape."""
    config = seeded.llava_onevision_config()
    config.text_config = Qwen2Config(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    config.vision_config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=14 * SIDE, patch_size=14,
        vision_use_head=False,
    )  # fmt: skip
    return config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return seeded.write_checkpoint(tmp_path_factory.mktemp("seeded") / "tiny", tiny_config())


TYPED = ["stream", "against", "--frames", 13, "--chunk", 4, "--budget", 256, "--threads", 1]


def test_the_command(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path))
    done = bench(*TYPED, "--model", tiny, "--precisions", "fp32,int8", "--theirs", "bf16", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["runtime"], line["precision"], line["vision_precision"]) for line in lines] == [
        (OURS, "fp32", "fp32"), (OURS, "int8", "int8"), (OTHER, "bf16", "bf16"), (OURS, "fp32", "fp32"), (OURS, "int8", "int8"),
    ]  # fmt: skip
    for line in lines:
        assert (line["bench"], line["policy"], line["frames"], line["budget"]) == ("stream-against", POLICY, 12, 256)
        assert (line["model"], line["threads"], line["chunk"]) == ("tiny", 1, 4)
    for line in lines[:3]:
        assert line["low"] <= line["ms_per_frame"] <= line["high"]
        assert line["vision_ms"] + line["prefill_ms"] + line["compress_ms"] > 0
    for line in lines[3:]:
        assert line["low"] <= line["fps_ratio"] <= line["high"]
        assert line["tokens_low"] <= line["tokens_ratio"] <= line["tokens_high"]

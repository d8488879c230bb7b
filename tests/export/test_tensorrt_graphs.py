"""Graphs for TensorRT on ONNX Runtime: every family's decoder says and stores what the graph of profile onnxruntime does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_runner import EngineRunner
from runner import Runner

from edgevlm.runtime.graph_profiles import TENSORRT_10_3, TENSORRT_10_15

PROFILES = (TENSORRT_10_3, TENSORRT_10_15)
SHAPES: dict[str, dict[str, Any]] = {
    "llava": {"tower": "clip", "backbone": "llama", "biases": True, "layers": 2, "heads": 6, "kv_heads": 6, "hidden": 96},
    "llava_next_video": {"tower": "clip", "backbone": "qwen3", "layers": 2, "heads": 6, "kv_heads": 1, "head_dim": 24},
    "llava_onevision": {"layers": 3, "heads": 6, "kv_heads": 2, "tied": True},
    "smolvlm": {"num_hidden_layers": 3},
    "qwen2_vl": {"num_hidden_layers": 3, "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112, "tied": True},
    "qwen2_5_vl": {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "depth": 3},
    "qwen3_vl": {"num_hidden_layers": 3, "head_dim": 32},
}  # fmt: skip
BEFORE, AFTER = (5, 1, 3, 16), (1, 2, 16, 1)  # rows of the calls before and after rows leave
MEMORY = {"valid": (np.nan, False), "capacity": (1e3, True)}  # what free rows hold, and whether they are read


def evict(runner: Runner | EngineRunner, garbage: float) -> None:
    """Layer l loses 2 + 3 l rows, each head its own: the last rows fill the holes. ``garbage`` stays behind."""
    for layer in range(len(runner.keys)):
        count, left = int(runner.past_len[layer]), int(runner.past_len[layer]) - 2 - 3 * layer
        random = np.random.default_rng(layer)
        for memory in (runner.keys[layer], runner.values[layer]):
            random = np.random.default_rng(layer)
            for head in range(memory.shape[1]):
                gone = random.choice(count, count - left, replace=False)
                kept = np.setdiff1d(np.arange(left, count), gone)
                memory[0, head, gone[gone < left]] = memory[0, head, kept]
                memory[0, head, left:] = garbage
        runner.past_len[layer] = left


def differences(ours: EngineRunner, theirs: Runner, rows: int, step: int) -> tuple[float, float, float]:
    """After a call of ``rows`` rows: the largest of logits, of probes and of valid rows of the memory."""
    spec, position = theirs.bundle.decoder, theirs.position
    embeds = np.random.default_rng(100 + step).standard_normal((rows, spec.row_width)).astype(np.float32)
    tables = theirs.tables(np.arange(position, position + rows, dtype=np.int32))
    asked = range(rows) if step % 2 else (-1,)
    expected, found = theirs.step(embeds, asked), ours.step(embeds, *tables, logit_rows=asked)
    assert expected.logits.std() > 0.1
    logits = np.abs(found.logits - expected.logits).max()
    probes = max(np.abs(found.probes[layer] - expected.probes[layer]).max() for layer in expected.probes)
    memory = 0.0
    for layer, length in enumerate(theirs.past_len):
        assert ours.past_len[layer] == length
        for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            valid = mine[layer][:, :, :length].astype(np.float64), other[layer][:, :, :length].astype(np.float64)
            memory = max(memory, float(np.abs(valid[0] - valid[1]).max()))
            free = mine[layer][:, :, length:].astype(np.float64)
            np.testing.assert_array_equal(free, np.full_like(free, ours.garbage))
    return float(logits), float(probes), memory


def compared(ours: EngineRunner, theirs: Runner, limit: float) -> None:
    worst = np.zeros(3)
    for step, rows in enumerate((*BEFORE, 0, *AFTER)):
        if rows:
            worst = np.maximum(worst, differences(ours, theirs, rows, step))
            continue
        evict(theirs, 0.0)
        evict(ours, ours.garbage)
        assert len(set(ours.past_len.tolist())) == len(ours.past_len), "layers hold different numbers of rows"
    print(f"{ours.bundle.family} {ours.bundle.profile}: logits {worst[0]:.1e}, probes {worst[1]:.1e}, memory {worst[2]:.1e}")
    assert worst.max() < limit


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", SHAPES)
def test_a_decoder_is_that_of_onnx_runtime(exported: Any, family: str, profile: str, memory: str) -> None:
    shape, (garbage, to_capacity) = SHAPES[family], MEMORY[memory]
    theirs = Runner(exported(family, **shape).bundle, 96, probes=range(shape.get("layers", shape.get("num_hidden_layers"))))
    ours = EngineRunner(exported(family, **shape, profile=profile).bundle, 96, garbage, to_capacity)
    compared(ours, theirs, 1e-4)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", SHAPES)
def test_the_tower_is_that_of_onnx_runtime(exported: Any, family: str, profile: str) -> None:
    theirs = Runner(exported(family, **SHAPES[family]).bundle, 8)
    ours = EngineRunner(exported(family, **SHAPES[family], profile=profile).bundle, 8)
    random = np.random.default_rng(0)
    vision = theirs.bundle.vision
    pixels = random.standard_normal((3 * vision.group, 3, *vision.size)).astype(np.float32)
    features = theirs.engine.encode(pixels)
    found = ours.encode(pixels.reshape(3, -1, *vision.size))
    assert found.shape == features.shape
    assert np.abs(found - features).max() < 1e-4 * features.std()

"""Rounded weights in graphs for TensorRT: they compute with the numbers that the bundle stores, and refuse what they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runner import EngineRunner, opened
from onnx import TensorProto
from reference_blocks import matrices, with_stored_numbers
from runner import Runner

from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.precisions import Layout, Stored
from edgevlm.export.precisions.layouts import Dense, Symmetric
from edgevlm.runtime.graph_profiles import TENSORRT_10_3, TENSORRT_10_15

LAYOUTS: dict[str, tuple[Any, float]] = {  # with half of the largest code's step, of the largest number
    "fp16": (Dense(np.float16, half=True), 2**-11),
    "rows": (Dense(np.float16, by_row=True, half=True), 2**-11),
    "int8": (Symmetric(8), 0.5 / 127),
    "int4": (Symmetric(4), 0.5 / 7),
}
SHAPES: dict[str, dict[str, Any]] = {
    "llava_onevision": {"layers": 2, "heads": 6, "kv_heads": 2, "tied": True, "side": 3},
    "qwen3_vl": {"num_hidden_layers": 2, "head_dim": 32},
}
CASES = [
    ("llava_onevision", TENSORRT_10_3, "fp16", "fp16"),
    ("llava_onevision", TENSORRT_10_15, "int8", "fp16"),
    ("llava_onevision", TENSORRT_10_3, "int4", "fp16"),
    ("qwen3_vl", TENSORRT_10_15, "int4", "fp32"),
]
LIMIT = 3e-3
"""Root mean square of a logit's error over the logits' deviation: of products, keys and values in float16."""


def product(folder: Path, layout: Layout, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    with (folder / "w").open("wb") as stream:
        g = GraphBuilder("product", WeightsFile(stream, "w"), opset=21)
        g.input("x", TensorProto.FLOAT, ["S", weight.shape[1]])
        g.output(Stored.of(layout, weight).multiply(g, "y", "x"), TensorProto.FLOAT, ["S", weight.shape[0]])
    g.save(folder / "g.onnx")
    found: np.ndarray = opened(folder / "g.onnx").run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("width", [16, 40, 96, 128, 384])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_product_is_that_of_the_stored_numbers(tmp_path: Path, name: str, width: int) -> None:
    layout, half_a_step = LAYOUTS[name]
    random = np.random.default_rng(width)
    weight, x = (random.standard_normal((rows, width)).astype(np.float32) for rows in (12, 5))
    weight[3], weight[4, :8] = 0, [0, 0, 0, 0, 0, 0, 0, -3]
    found = product(tmp_path, layout, weight, x)
    stored = matrices(tmp_path, "g.onnx")["y"]
    assert np.abs(stored - weight).max() <= 1.01 * half_a_step * np.abs(weight).max()
    assert not stored[3].any()
    bound = 2**-11 * np.abs(x) @ np.abs(stored).T * 4 + 1e-3
    assert np.all(np.abs(found - x.astype(np.float64) @ stored.T) < bound)


def logits(runner: Runner | EngineRunner, tables: Callable[..., Any]) -> np.ndarray:
    random, found, position = np.random.default_rng(3), [], 0
    for rows in (9, 1, 12, 1):
        embeds = (random.standard_normal((rows, runner.bundle.decoder.row_width)) * 0.5).astype(np.float32)
        at = tables(np.arange(position, position + rows, dtype=np.int32))
        step = runner.step(embeds, range(rows)) if isinstance(runner, Runner) else runner.step(embeds, *at, range(rows))
        found.append(step.logits)
        position += rows
    return np.concatenate(found)


@pytest.mark.parametrize(("family", "profile", "precision", "kv"), CASES)
def test_a_decoder_computes_with_the_stored_numbers(
    exported: Any, tmp_path: Path, family: str, profile: str, precision: str, kv: str
) -> None:
    plain = exported(family, **SHAPES[family]).bundle
    rounded = exported(family, **SHAPES[family], profile=profile, precision=precision, kv=kv).bundle
    theirs, ours = Runner(with_stored_numbers(plain, rounded, tmp_path / "wanted"), 64), EngineRunner(rounded, 64)
    wanted, found, exact = (logits(runner, theirs.tables) for runner in (theirs, ours, Runner(plain, 64)))
    error, change = (float(np.sqrt(np.square(x - wanted).mean()) / wanted.std()) for x in (found, exact))
    print(f"{family} {profile} {precision}: error {error:.1e}, rounding {change:.1e} of the logits' deviation")
    assert error < LIMIT
    assert precision == "fp16" or change > 2 * error
    vision = ours.bundle.vision
    pixels = np.random.default_rng(0).standard_normal((2 * vision.group, 3, *vision.size)).astype(np.float32)
    features = Runner(plain, 8).engine.encode(pixels)
    halved = ours.encode(pixels.reshape(2, -1, *vision.size))
    assert vision.precision == "fp16"
    assert 1e-6 < np.abs(halved - features).max() / features.std() < 2e-2

"""What towers are made of: each layer is torch's, in ONNX Runtime's operators and in ONNX's own, and 8 bits as written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from engine_runner import opened

from edgevlm.bench.seeded import decoder_bundle
from edgevlm.engines.onnx_file import operators
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.precisions.layouts import Channels
from edgevlm.export.vision import GRAPH, Tower, write_vision
from edgevlm.export.vision.layers import ACTIVATIONS, VisionGraph
from edgevlm.runtime.bundle import FileRecord
from edgevlm.runtime.engine import load_engine

SHAPE = DecoderShape(1, 1, 1, 8, 8, 8, 8, norm_eps=1e-6, rope_theta=1e4, model_limit=64, tied=True)
BEFORE = "DynamicQuantizeMatMul"
PATCHES, WIDTH, HEADS, SCALE = 12, 8, 3, 0.5


class Tensors:
    """A checkpoint of these arrays."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = {name.replace("_", ".", 1): array.astype(np.float32) for name, array in arrays.items()}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        assert self.arrays[name].shape == shape

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.check(name, shape)
        return self.arrays[name].copy()

    def rows(self, name: str, shape: tuple[int, ...]) -> Any:
        yield from np.array_split(self.tensor(name, shape), 3)


class Small(Tower):
    """Two linears, one without a bias, and attention of 3 heads between them: ``[F, 3, 12, 6]`` to ``[F, 12, 8]``."""

    size, tokens, width = (PATCHES, 6), PATCHES, WIDTH

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.tensors = Tensors(
            first_weight=rng.standard_normal((72, 18)) / 4, first_bias=rng.standard_normal(72),
            second_weight=rng.standard_normal((WIDTH, 24)) / 5,
        )  # fmt: skip

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        rows = graph.reshape("rows", graph.transpose("turned", pixels, 0, 2, 1, 3), 0, PATCHES, -1)
        q, k, v = graph.split("parts", graph.linear("first", rows, 18, 72), [24] * 3)
        attended = graph.attention("attended", q, k, v, rows=PATCHES, heads=HEADS, scale=SCALE)
        return graph.linear("second", attended, 24, WIDTH, bias=False)

    def write(self, folder: Path, precision: str = "fp32", standard: bool = False) -> Any:
        write_vision(self, self.tensors, folder, precision, standard)  # type: ignore[arg-type]
        return onnx.load(folder / GRAPH, load_external_data=False).graph


def reference(frame: np.ndarray, linear: Callable[..., np.ndarray]) -> np.ndarray:
    """The tower in float64, of one frame."""
    tensors = Small().tensors.arrays
    rows = linear(frame.astype(float).transpose(1, 0, 2).reshape(PATCHES, 18), tensors["first.weight"], tensors["first.bias"])
    q, k, v = rows.reshape(PATCHES, 3, HEADS, 8).transpose(1, 2, 0, 3)
    scores = np.exp(SCALE * q @ k.transpose(0, 2, 1))
    attended = scores / scores.sum(-1, keepdims=True) @ v
    return linear(attended.transpose(1, 0, 2).reshape(PATCHES, 24), tensors["second.weight"], 0.0)


def exact(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    return rows @ weight.astype(float).T + bias


def quantised(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    """A scale a row and a scale a channel; the largest weight of a channel is 128 of its scale."""
    scales = np.maximum(rows.max(1) / 127, rows.min(1) / -128)[:, None]
    columns = np.take_along_axis(weight, np.abs(weight).argmax(1)[:, None], 1) / -128
    return np.rint(rows / scales) @ np.rint(weight / columns).clip(-128, 127).T * scales * columns.T + bias


@pytest.fixture
def frames() -> np.ndarray:
    scales = np.float32([[[[1]]], [[[5]]], [[[0.2]]]])
    return np.random.default_rng(0).standard_normal((3, 3, PATCHES, 6)).astype(np.float32) * scales


def engine(folder: Path, precision: str) -> Any:
    bundle, tower = decoder_bundle(folder, SHAPE), Small()
    tower.write(folder, precision)
    spec = dataclasses.replace(bundle.vision, graph=GRAPH, size=tower.size, tokens_per_frame=PATCHES, precision=precision)
    files = {path.name: FileRecord(path.stat().st_size, "") for path in folder.iterdir()}
    return load_engine("onnxruntime-cpu", dataclasses.replace(bundle, vision=spec, files=files), threads=1)


def test_int8_computes_what_is_written_down(tmp_path: Path, frames: np.ndarray) -> None:
    features = engine(tmp_path, "int8").encode(frames)
    wanted = np.stack([reference(frame, quantised) for frame in frames])
    error = np.abs(features - wanted).max((1, 2)) / np.abs(wanted).max((1, 2))
    assert error.max() < 0.02, "a code on the edge between two may go either way"
    assert np.median(np.abs(features - wanted)) < 1e-5
    plain = engine(tmp_path, "fp32").encode(frames)
    np.testing.assert_allclose(plain, np.stack([reference(frame, exact) for frame in frames]), rtol=1e-5, atol=1e-5)
    assert np.abs(plain - features).max() > 1e-3, "8 bits cannot be as exact as 32"


@pytest.mark.parametrize("of_before", [False, True])
def test_a_frames_features_do_not_depend_on_its_company(
    tmp_path: Path, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch, of_before: bool
) -> None:
    if of_before:  # one scale for all rows of a call
        monkeypatch.setattr(Channels, "multiply", lambda _, g, name, rows, parts, *__: g.fused(BEFORE, [rows, *parts], [name]))
    loaded = engine(tmp_path, "int8")
    alone = np.concatenate([loaded.encode(frames[index : index + 1]) for index in range(3)])
    np.testing.assert_array_equal(loaded.encode(frames), alone)
    assert (BEFORE in operators((tmp_path / GRAPH).read_bytes())) == of_before


class OneLinear(Tower):
    """A linear and its activation: ``[F, 3, 9, 4]`` to ``[F, 9, 6]``."""

    size, tokens, width = (9, 4), 9, 6

    def __init__(self, kind: str, bias: bool) -> None:
        self.kind, self.bias = kind, bias

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        rows = graph.reshape("rows", graph.transpose("turned", pixels, 0, 2, 1, 3), 0, 9, -1)
        return graph.linear("fc", rows, 12, 6, bias=self.bias, activation=self.kind)


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_transformers_own(tmp_path: Path, kind: str, bias: bool, standard: bool) -> None:
    from transformers.activations import ACT2FN

    rng = np.random.default_rng(0)
    arrays = {"fc_weight": rng.standard_normal((6, 12)) / 3} | ({"fc_bias": rng.standard_normal(6)} if bias else {})
    write_vision(OneLinear(kind, bias), Tensors(**arrays), tmp_path, standard=standard)  # type: ignore[arg-type]
    pixels = np.random.default_rng(1).standard_normal((2, 3, 9, 4)).astype(np.float32) * 3
    found = opened(tmp_path / GRAPH).run(None, {"pixel_values": pixels})[0]
    rows = pixels.transpose(0, 2, 1, 3).reshape(2, 9, 12).astype(np.float64)
    product = torch.from_numpy(rows @ arrays["fc_weight"].T + arrays.get("fc_bias", np.zeros(6)))
    np.testing.assert_allclose(found, ACT2FN[kind](product).numpy(), atol=3e-6)

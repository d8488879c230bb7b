"""What towers are made of: each layer is torch's, in ONNX Runtime's operators and in ONNX's own, and 8 bits as written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from engine_runner import opened
from torch import nn

from edgevlm.bench.seeded import decoder_bundle
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.vision import GRAPH, VisionTower, write_vision
from edgevlm.export.vision.layers import ACTIVATIONS, VisionGraph, averaging, bilinear
from edgevlm.runtime.bundle import FileRecord
from edgevlm.runtime.engine import load_engine

SHAPE = DecoderShape(1, 1, 1, 8, 8, 8, 8, norm_eps=1e-6, rope_theta=1e4, model_limit=64, tied=True)
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


class Small(VisionTower):
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
    """As the module's description says; all rows of the call are rounded together."""
    low, high = min(0.0, rows.min()), max(0.0, rows.max())
    step = (high - low) / 255
    zero = np.clip(np.rint(-low / step), 0, 255)
    codes = np.clip(np.rint(rows / step) + zero, 0, 255) - zero
    columns = np.abs(weight).max(1) / 127
    product = codes @ np.rint(weight / columns[:, None]).T
    return product * step * columns + bias


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


def test_a_frames_features_do_not_depend_on_its_company(tmp_path: Path, frames: np.ndarray) -> None:
    loaded = engine(tmp_path, "int8")
    alone = np.concatenate([loaded.encode(frames[index : index + 1]) for index in range(3)])
    np.testing.assert_array_equal(loaded.encode(frames), alone)
    together = ort.InferenceSession(str(tmp_path / GRAPH), providers=["CPUExecutionProvider"])
    assert np.any(together.run(None, {"pixel_values": frames})[0] != alone), "in one call they would"


class OneLayer(VisionTower):
    """Rows of pixels ``[F, 3, side, side * n]`` through ``layer(graph, rows)``, of rows ``[F, side * side, 3 n]``."""

    def __init__(self, layer: Callable[[VisionGraph, str], str], side: int, tokens: int, width: int) -> None:
        self.layer, self.size, self.tokens, self.width = layer, (side, 4 * side), tokens, width

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        side = self.size[0]
        cut = graph.transpose("turned", graph.reshape("cut", pixels, 0, 3, side, side, 4), 0, 2, 3, 1, 4)
        return self.layer(graph, graph.reshape("rows", cut, -1, side * side, 12))

    def run(self, folder: Path, standard: bool, **arrays: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """What it gives for random rows, and these."""
        write_vision(self, Tensors(**arrays), folder, standard=standard)  # type: ignore[arg-type]
        pixels = np.random.default_rng(1).standard_normal((2, 3, *self.size)).astype(np.float32) * 3
        found = opened(folder / GRAPH).run(None, {"pixel_values": pixels})[0]
        cut = pixels.reshape(2, 3, self.size[0], self.size[0], 4).transpose(0, 2, 3, 1, 4)
        return found, torch.from_numpy(cut.reshape(2, -1, 12).copy())


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_transformers_own(tmp_path: Path, kind: str, bias: bool, standard: bool) -> None:
    from transformers.activations import ACT2FN

    rng = np.random.default_rng(0)
    arrays = {"fc_weight": rng.standard_normal((6, 12)) / 3} | ({"fc_bias": rng.standard_normal(6)} if bias else {})
    tower = OneLayer(lambda g, rows: g.linear("fc", rows, 12, 6, bias=bias, activation=kind), 3, 9, 6)
    found, rows = tower.run(tmp_path, standard, **arrays)
    product = rows.double() @ torch.from_numpy(arrays["fc_weight"]).T + torch.from_numpy(arrays.get("fc_bias", np.zeros(6)))
    np.testing.assert_allclose(found, ACT2FN[kind](product).numpy(), atol=3e-6)


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norms_are_torch_s(tmp_path: Path, kind: str, skip: bool, standard: bool) -> None:
    def layer(g: VisionGraph, rows: str) -> str:
        twice = g.mul("twice", rows, 2.0)
        return g.node("Concat", getattr(g, kind)("norm", rows, 12, 1e-5, twice if skip else ""), "both", axis=-1)

    rng = np.random.default_rng(0)
    arrays = {"norm_weight": rng.standard_normal(12), "norm_bias": rng.standard_normal(12)}
    found, rows = OneLayer(layer, 3, 9, 24).run(tmp_path, standard, **arrays)
    total = rows.double() * (3 if skip else 1)
    weight, bias = (torch.from_numpy(array) for array in arrays.values())
    normed = (
        nn.functional.layer_norm(total, (12,), weight, bias, 1e-5)
        if kind == "layer_norm"
        else nn.functional.rms_norm(total, (12,), weight, 1e-5)
    )
    np.testing.assert_allclose(found, torch.cat([normed, total], -1).numpy(), atol=3e-6)


@pytest.mark.parametrize(("side", "few"), [(5, 3), (27, 14), (4, 2)])
def test_resampling_is_torch_s(tmp_path: Path, side: int, few: int) -> None:
    matrix = bilinear(side, few)
    found, rows = OneLayer(lambda g, x: g.resample("r", x, 12, matrix), side, few**2, 12).run(tmp_path, standard=True)
    grid = rows.double().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    small = nn.functional.interpolate(grid, size=(few, few), mode="bilinear")
    np.testing.assert_allclose(found, small.flatten(2).transpose(1, 2).numpy(), atol=1e-5)


@pytest.mark.parametrize(("side", "stride"), [(4, 2), (5, 2), (7, 3)])
def test_pools_are_torch_s(tmp_path: Path, side: int, stride: int) -> None:
    tower = OneLayer(lambda g, x: g.resample("pool", x, 12, averaging(side, stride)), side, (side // stride) ** 2, 12)
    found, rows = tower.run(tmp_path, standard=True)
    grid = rows.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    np.testing.assert_allclose(found, nn.AvgPool2d(stride, stride)(grid).flatten(2).transpose(1, 2).numpy(), atol=1e-5)

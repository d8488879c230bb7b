"""Towers in 8 bits: what the graph computes is what is written down here in float64, and a frame is encoded alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from edgevlm.bench.seeded import decoder_bundle
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.vision import GRAPH, VisionFeatures, write_vision
from edgevlm.export.vision.attention import attend
from edgevlm.export.vision.rounding import round_columns
from edgevlm.runtime.engine import load_engine

SHAPE = DecoderShape(1, 1, 1, 8, 8, 8, 8, norm_eps=1e-6, rope_theta=1e4, model_limit=64, tied=True)


class Small(VisionFeatures):
    """Two linears, one without a bias, and attention between them: ``[F, 3, 4, 6]`` to ``[F, 4, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size, self.first, self.second = (4, 6), nn.Linear(18, 24), nn.Linear(24, 8, bias=False)
        self.eval()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.first(pixel_values.transpose(1, 2).flatten(2))
        heads = rows.unflatten(2, (3, 8))
        out: torch.Tensor = self.second(attend(heads, heads, heads, 0.5))
        return out


def quantised_linear(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    """``rows @ weight.T + bias`` as the module's description says, float64; all rows of the call are rounded together."""
    low, high = min(0.0, rows.min()), max(0.0, rows.max())
    step = (high - low) / 255
    zero = np.clip(np.rint(-low / step), 0, 255)
    codes = np.clip(np.rint(rows / step) + zero, 0, 255) - zero
    columns = np.abs(weight).max(1) / 127
    product = codes @ np.rint(weight / columns[:, None]).T
    return product * step * columns + bias


def reference(module: Small, frame: np.ndarray) -> np.ndarray:
    first, second = (part.weight.detach().double().numpy() for part in (module.first, module.second))
    rows = quantised_linear(frame.transpose(1, 0, 2).reshape(4, 18), first, module.first.bias.detach().double().numpy())
    heads = rows.reshape(4, 3, 8).transpose(1, 0, 2)
    scores = np.exp(0.5 * heads @ heads.transpose(0, 2, 1))
    attended = scores / scores.sum(-1, keepdims=True) @ heads
    return quantised_linear(attended.transpose(1, 0, 2).reshape(4, 24), second, 0.0)


@pytest.fixture
def frames() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 3, 4, 6)).astype(np.float32) * np.float32([[[[1]]], [[[5]]], [[[0.2]]]])


def engine(module: Small, folder: Path, precision: str) -> Any:
    bundle = decoder_bundle(folder, SHAPE)
    tokens, width = write_vision(module, folder, precision)
    assert (tokens, width) == (4, 8)
    spec = dataclasses.replace(bundle.vision, graph=GRAPH, size=module.size, tokens_per_frame=tokens, precision=precision)
    return load_engine("onnxruntime-cpu", dataclasses.replace(bundle, vision=spec), threads=1)


def test_the_graph_computes_what_is_written_down(tmp_path: Path, frames: np.ndarray) -> None:
    module = Small()
    features = engine(module, tmp_path, "int8").encode(frames)
    wanted = np.stack([reference(module, frame.astype(np.float64)) for frame in frames])
    error = np.abs(features - wanted).max((1, 2)) / np.abs(wanted).max((1, 2))
    assert error.max() < 0.01, "a code on the edge between two may go either way"
    assert np.median(np.abs(features - wanted)) < 1e-5
    exact = engine(module, tmp_path, "fp32").encode(frames)
    with torch.no_grad():
        np.testing.assert_allclose(exact, module(torch.from_numpy(frames)).numpy(), atol=1e-5)
    assert np.abs(exact - features).max() > 1e-4, "8 bits cannot be as exact as 32"


def test_a_frames_features_do_not_depend_on_its_company(tmp_path: Path, frames: np.ndarray) -> None:
    loaded = engine(Small(), tmp_path, "int8")
    alone = np.concatenate([loaded.encode(frames[index : index + 1]) for index in range(3)])
    np.testing.assert_array_equal(loaded.encode(frames), alone)
    together = ort.InferenceSession(str(tmp_path / GRAPH), providers=["CPUExecutionProvider"])
    assert np.any(together.run(None, {"pixel_values": frames})[0] != alone), "in one call they would"


def test_only_codes_of_the_matrices_are_in_the_file(tmp_path: Path) -> None:
    write_vision(Small(), tmp_path, "int8")
    graph = onnx.load(str(tmp_path / GRAPH), load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("DynamicQuantizeMatMul") == 2
    assert "MatMul" not in kinds
    assert all(len(tensor.dims) < 2 for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)


def test_columns_are_rounded_to_127_steps_of_their_largest() -> None:
    codes, scales = round_columns(np.float32([[1, 0, -3], [-0.5, 0, 3], [0.25, 0, 1]]))
    np.testing.assert_allclose(scales, [1 / 127, 1, 3 / 127])
    np.testing.assert_array_equal(codes, [[127, 0, -127], [-64, 0, 127], [32, 0, 42]])


def test_attention_is_one_node_whose_memory_grows_with_the_patches_alone(tmp_path: Path) -> None:
    write_vision(Small(), tmp_path)
    graph = onnx.load(str(tmp_path / GRAPH), load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    assert "MultiHeadAttention" in kinds
    assert not kinds & {"Softmax", "Attention"}

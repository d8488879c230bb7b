"""Attention of towers for TensorRT: a few queries at a time, in the precision of the tower, and what float16 cannot hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from engine_runner import opened
from onnx import TensorProto
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.vision import GRAPH, WEIGHTS, VisionFeatures, attention, write_vision
from edgevlm.export.vision.attention import attend

PATCHES, QUERIES = 12, 5


class Small(VisionFeatures):
    """Two linears with attention of 3 heads between them: ``[F, 3, 12, 6]`` to ``[F, 12, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size, self.first, self.second = (PATCHES, 6), nn.Linear(18, 72), nn.Linear(24, 8, bias=False)
        self.eval()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.first(pixel_values.transpose(1, 2).flatten(2))
        q, k, v = rows.unflatten(2, (3, 3, 8)).unbind(2)
        out: torch.Tensor = self.second(attend(q, k, v, 0.5))
        return out


@pytest.fixture
def frames() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 3, PATCHES, 6)).astype(np.float32)


@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("fp16", 5e-3)])
def test_no_scores_of_all_pairs(
    tmp_path: Path, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch, precision: str, error: float
) -> None:
    monkeypatch.setattr(attention, "QUERIES", QUERIES)
    assert write_vision(Small(), tmp_path, precision, standard=True) == (PATCHES, 8)
    found = opened(tmp_path / GRAPH).run(None, {"pixel_values": frames})[0]
    with torch.no_grad():
        wanted = Small()(torch.from_numpy(frames)).numpy()
    assert np.abs(found - wanted).max() < error * wanted.std()
    assert precision == "fp32" or np.abs(found - wanted).max() > 1e-5 * wanted.std()
    model = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / GRAPH, load_external_data=False))
    shapes = {value.name: value.type.tensor_type for value in model.graph.value_info}
    softmax = [shapes[node.output[0]] for node in model.graph.node if node.op_type == "Softmax"]
    assert [tuple(dim.dim_value for dim in kind.shape.dim)[-2:] for kind in softmax] == [(5, 12), (5, 12), (2, 12)]
    assert {kind.elem_type for kind in softmax} == {TensorProto.FLOAT16 if precision == "fp16" else TensorProto.FLOAT}


def test_linears_are_float16_in_the_file(tmp_path: Path) -> None:
    write_vision(Small(), tmp_path, "fp16", standard=True)
    graph = onnx.load(tmp_path / GRAPH, load_external_data=False).graph
    matrices = [tensor for tensor in graph.initializer if len(tensor.dims) == 2]
    assert sorted(tuple(tensor.dims) for tensor in matrices) == [(18, 72), (24, 8)]
    assert {tensor.data_type for tensor in matrices} == {TensorProto.FLOAT16}
    assert sorted(path.name for path in tmp_path.iterdir()) == [GRAPH, WEIGHTS]


def test_a_weight_that_float16_cannot_hold(tmp_path: Path) -> None:
    module = Small()
    with torch.no_grad():
        module.second.weight[0, 0] = 1e5
    with pytest.raises(UserError, match="a weight of 100000 in the tower does not fit in fp16; give --vision-precision fp32"):
        write_vision(module, tmp_path, "fp16", standard=True)


def test_forms_end_with_their_block(tmp_path: Path) -> None:
    with attention.traced_as("half"):
        pass
    write_vision(Small(), tmp_path)
    graph = onnx.load(tmp_path / GRAPH, load_external_data=False).graph
    assert "MultiHeadAttention" in {node.op_type for node in graph.node}

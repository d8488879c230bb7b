"""No graph for a TensorRT version has an operator, or a type of it, that the version's parser does not take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import make_checkpoint
from more_checkpoints import CLASSES, FRAME, make_more
from onnx import TensorProto
from tensorrt_allowed import Allowed

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.decoder import write_decoder
from edgevlm.export.families import load_family
from edgevlm.export.graph import CONTRIB, GraphBuilder, WeightsFile
from edgevlm.export.options import ExportOptions
from edgevlm.export.precisions import load_precision
from edgevlm.export.profiles import load_profile
from edgevlm.export.vision import GRAPH, write_vision
from edgevlm.export.writer import decoder_shape
from edgevlm.runtime.graph_profiles import TENSORRT_10_3, TENSORRT_10_15
from edgevlm.runtime.plugins import names

PROFILES = (TENSORRT_10_3, TENSORRT_10_15)
WITH_TENSORRT = [name for name in names("precisions") if load_precision(name).tensorrt]


@pytest.mark.parametrize("family", names("families"))
def test_every_family_and_precision(tmp_path: Path, family: str) -> None:
    make = make_more if family in CLASSES else make_checkpoint
    checkpoint = Checkpoint(make(tmp_path / "checkpoint", family))
    known = load_family(family, "")
    parts = known.parts(checkpoint, FRAME)
    backbone, plain = decoder_shape(checkpoint)
    shape, seen = replace(plain, deepstack=parts.deepstack), set()
    for profile in map(load_profile, PROFILES):
        for precision in WITH_TENSORRT:
            for kv in profile.kv:
                folder = tmp_path / f"{profile.name}-{precision}-{kv}"
                folder.mkdir()
                options = ExportOptions(precision=precision, kv=kv, profile=profile.name)
                made = write_decoder(checkpoint, backbone, shape, folder, options)
                assert list(made.graphs) == ["full"]
                Allowed.load(profile.name).check(folder / made.graphs["full"])
                nodes = onnx.load(folder / made.graphs["full"], load_external_data=False).graph.node
                seen |= {(profile.name, node.op_type) for node in nodes}
    assert {op for name, op in seen if name == TENSORRT_10_15} >= {"TensorScatter", "Attention", "DequantizeLinear"}
    assert not {op for name, op in seen if name == TENSORRT_10_3} & {"TensorScatter", "Attention"}
    for precision in ("fp32", "fp16"):
        write_vision(parts.vision, checkpoint, tmp_path, precision, standard=True)
        for name in PROFILES:
            Allowed.load(name).check(tmp_path / GRAPH)


def graph(folder: Path, change: Callable[[GraphBuilder], Any], opset: int = 20) -> Path:
    """A product and, made by ``change`` of ``x`` float32 ``[2, 4]``, something else."""
    with (folder / "w").open("wb") as stream:
        g = GraphBuilder("g", WeightsFile(stream, "w"), opset)
        g.input("x", TensorProto.FLOAT, [2, 4])
        g.output(g.node("MatMul", ["x", g.constant("m", np.eye(4, dtype=np.float32))], ["y"]), TensorProto.FLOAT, [2, 4])
        change(g)
    g.save(folder / "g.onnx")
    return folder / "g.onnx"


def squeezed(g: GraphBuilder) -> None:
    g.input("axes", TensorProto.INT64, [1])
    g.node("Unsqueeze", ["x", "axes"], ["z"])


BAD: dict[str, Callable[[GraphBuilder], Any]] = {
    "no operator DynamicQuantizeLinear": lambda g: g.node("DynamicQuantizeLinear", ["x"], ["a", "b", "z"]),
    f"no operator MultiHeadAttention {CONTRIB}": lambda g: g.node("MultiHeadAttention", ["x"], ["z"], CONTRIB),
    "x.double is DOUBLE": lambda g: g.node("Abs", [g.node("Cast", ["x"], ["x.double"], to=TensorProto.DOUBLE)], ["z"]),
    "axes is not constant": squeezed,
    "x.int is INT32": lambda g: g.node("Einsum", [g.node("Cast", ["x"], ["x.int"], to=6)], ["z"], equation="ij->i"),
}  # fmt: skip


@pytest.mark.parametrize("says", BAD)
@pytest.mark.parametrize("name", PROFILES)
def test_what_the_parser_does_not_take_is_found(tmp_path: Path, name: str, says: str) -> None:
    allowed = Allowed.load(name)
    allowed.check(graph(tmp_path, lambda _: None))
    with pytest.raises(AssertionError, match=f"g.onnx has what TensorRT {allowed.tensorrt} does not take: .*{says}"):
        allowed.check(graph(tmp_path, BAD[says]))


def test_a_newer_opset_is_found(tmp_path: Path) -> None:
    newer = graph(tmp_path, lambda _: None, 21)
    Allowed.load(TENSORRT_10_15).check(newer)
    with pytest.raises(AssertionError, match=r"TensorRT 10\.3 does not take: opset ai\.onnx 21"):
        Allowed.load(TENSORRT_10_3).check(newer)

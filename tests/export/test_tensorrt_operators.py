"""No graph for a TensorRT version has an operator, or a type of it, that the version's parser does not take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from checkpoints import make_checkpoint
from more_checkpoints import CLASSES, FRAME, make_more
from tensorrt_allowed import Allowed

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.decoder import write_decoder
from edgevlm.export.families import load_family
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

"""A family, a precision and a backend from outside the package take one file each, which an entry point names."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgevlm.apps.planning.memory import weights_of
from edgevlm.apps.planning.model import plan_bundle, plan_checkpoint
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import MANIFEST, Bundle, seal_manifest
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

FAMILY = """
from typing import ClassVar

from edgevlm.export.families import Family, FamilyParts, block_parameters, square_geometry


class Plain(Family):
    content_type: ClassVar[str] = "video"
    positions: ClassVar[str] = "rows"
    fading: ClassVar[tuple[str, str]] = ("9/8", "0.5/0.4")

    def parts(self, checkpoint, camera):
        from edgevlm.export.vision.square import SquareTower

        vision = SquareTower(checkpoint)
        return FamilyParts(vision, (vision.side, vision.side))

    def geometry(self, config, sized):
        vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
        width, inner, patch = (vision[key] for key in ("hidden_size", "intermediate_size", "patch_size"))
        patches, blocks = (vision["image_size"] // patch) ** 2, vision["num_hidden_layers"]
        projector = width * hidden + hidden * hidden + 2 * hidden
        stem = 3 * patch * patch * width + patches * width + width
        parameters = stem + blocks * (block_parameters(width, inner) + 4 * width) + projector
        rows = {"projector_parameters": projector, "projected": patches, "tokens": patches}
        return square_geometry(vision, parameters, blocks, patches, **rows)
"""
PRECISION = """
from edgevlm.export.precisions import Layouts, Precision
from edgevlm.export.precisions.layouts import Blocks

WIDE = Precision(onnxruntime=Layouts(Blocks(8, 64), Blocks(8)), tensorrt=None)
"""
BACKEND = """
import numpy as np

from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu


class Upside(OnnxRuntimeCpu):
    def encode(self, pixels):
        return super().encode(np.ascontiguousarray(pixels[:, :, ::-1]))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``installed(module, text, group, name, attribute)``: a package of one file, with an entry point."""

    def install(module: str, text: str, group: str, name: str, attribute: str) -> Path:
        package = tmp_path / module
        about = package / f"{module}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[edgevlm.{group}]\n{name} = {module}:{attribute}\n")
        (package / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(package)
        assert len(list(package.glob("*.py"))) == 1
        return package / f"{module}.py"

    yield install
    for module in ("plain_family", "wide_precision", "upside_backend"):
        sys.modules.pop(module, None)


def answers(model: Model) -> str:
    frames = np.random.default_rng(0).integers(0, 256, (3, *model.bundle.vision.size, 3), np.uint8)
    with Session.open(model, budget=200) as session:
        for number, frame in enumerate(frames):
            session.watch(frame, number / 2)
        return session.ask("how many are there now?", max_tokens=6).text


def test_a_family_is_one_file(exported: Any, installed: Any, tmp_path: Path) -> None:
    made = exported("llava_onevision", side=5, tied=True)
    checkpoint = shutil.copytree(made.checkpoint, tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "plain_vl"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model type 'plain_vl' is not known"):
        export_checkpoint(checkpoint, tmp_path / "bundle")
    with pytest.raises(UserError, match="model type 'plain_vl' is not known"):
        plan_checkpoint(checkpoint, (480, 640))
    installed("plain_family", FAMILY, "families", "plain_vl", "Plain")
    bundle = Bundle.load(export_checkpoint(checkpoint, tmp_path / "bundle"))
    assert (bundle.family, bundle.vision.grid, bundle.decoder.fading) == ("plain_vl", (5, 5), ("9/8", "0.5/0.4"))
    planned, counted = plan_checkpoint(checkpoint, (480, 640)), plan_bundle(str(tmp_path / "bundle"))
    assert planned.tower.tokens == counted.tower.tokens == planned.tower.patches == counted.tower.patches == 25
    assert planned.tower.parameters == pytest.approx(counted.tower.parameters, rel=0.03)
    model = Model.load(tmp_path / "bundle", threads=1)
    assert answers(model)
    model.close()


def test_a_bundle_of_an_unknown_family_is_counted_as_no_other(exported: Any, tmp_path: Path) -> None:
    bundle = shutil.copytree(exported("llava_onevision", side=5, tied=True).bundle, tmp_path / "bundle")
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_bytes(seal_manifest(manifest | {"family": "llava_twovision"}))
    with pytest.raises(UserError, match=r"model type 'llava_twovision' is not known; did you mean 'llava_onevision'\?"):
        plan_bundle(str(bundle))


def test_bundles_from_before_their_manifest_had_hermes_s_fading(exported: Any, tmp_path: Path) -> None:
    for family, fading in (("llava_onevision", ("20/19.5", "1.0/0.9")), ("qwen2_vl", ("20/12", "0.75/0.6"))):
        bundle = shutil.copytree(exported("llava_onevision", side=5, tied=True).bundle, tmp_path / family)
        manifest = json.loads((bundle / MANIFEST).read_text())
        del manifest["decoder"]["fading"]
        (bundle / MANIFEST).write_bytes(seal_manifest(manifest | {"family": family}))
        assert Bundle.load(bundle, verify="size").decoder.fading == fading


def test_a_precision_is_one_file(exported: Any, installed: Any, tmp_path: Path) -> None:
    made = exported("llava_onevision", side=5, tied=True)
    installed("wide_precision", PRECISION, "precisions", "int8-wide", "WIDE")
    bundle = export_checkpoint(made.checkpoint, tmp_path / "bundle", precision="int8-wide")
    planned = plan_checkpoint(made.checkpoint, (480, 640))
    wide, blocks, half = (weights_of(planned, name, "cpu").layers for name in ("int8-wide", "int8", "fp16"))
    assert wide < blocks < half
    with pytest.raises(UserError, match=r"--precision int8-wide cannot be written for tensorrt-10\.3; give fp16 or fp32"):
        export_checkpoint(made.checkpoint, tmp_path / "engine", precision="int8-wide", profile="tensorrt-10.3")
    model = Model.load(bundle, threads=1)
    assert model.bundle.decoder.precision == "int8-wide"
    assert answers(model)
    model.close()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_backend_is_one_file(exported: Any, installed: Any, by_name: bool) -> None:
    file = installed("upside_backend", BACKEND, "engines", "upside", "Upside")
    made = exported("llava_onevision", side=5, tied=True)
    model = Model.load(made.bundle, engine="upside" if by_name else f"{file}:Upside", threads=1)
    plain = Model.load(made.bundle, threads=1)
    pixels = np.random.default_rng(0).standard_normal((1, 3, *plain.bundle.vision.size)).astype(np.float32)
    assert np.array_equal(model.engine.encode(pixels), plain.engine.encode(np.ascontiguousarray(pixels[:, :, ::-1])))
    assert answers(model)
    for each in (model, plain):
        each.close()

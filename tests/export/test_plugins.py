"""A family, a precision and a backend from outside the package take one file each, which an entry point names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf import answer, load, watch
from more_checkpoints import make_gemma, make_internvl

from edgevlm.apps.planning.formulas import weights_of
from edgevlm.apps.planning.model import plan_bundle, plan_checkpoint
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.testing import check_family

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``installed(module, group, name, attribute)``: an example as a package of one file, with an entry point."""

    def install(module: str, group: str, name: str, attribute: str, text: str = "") -> Path:
        package = tmp_path / module
        about = package / f"{module}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[edgevlm.{group}]\n{name} = {module}:{attribute}\n")
        (package / f"{module}.py").write_text(text or (EXAMPLES / f"{module}.py").read_text())
        monkeypatch.syspath_prepend(package)
        assert len(list(package.glob("*.py"))) == 1
        return package / f"{module}.py"

    yield install
    for module in ("internvl", "my_precision", "my_engine", "my_backbone"):
        sys.modules.pop(module, None)


def answers(model: Model) -> str:
    frames = np.random.default_rng(0).integers(0, 256, (3, *model.bundle.vision.size, 3), np.uint8)
    with Session.open(model, budget=200) as session:
        for number, frame in enumerate(frames):
            session.watch(frame, number / 2)
        return session.ask("how many are there now?", max_tokens=6).text


def test_a_family_is_one_file(installed: Any, tmp_path: Path) -> None:
    checkpoint, file = make_internvl(tmp_path / "checkpoint"), EXAMPLES / "internvl.py"
    for refused in (
        lambda: export_checkpoint(checkpoint, tmp_path / "bundle"),
        lambda: plan_checkpoint(checkpoint, (480, 640)),
    ):
        with pytest.raises(UserError, match="model type 'internvl' is not supported"):
            refused()
    passed = check_family(f"{file}:InternVL", checkpoint)
    assert [line.partition(":")[0] for line in passed] == ["export", "tower", "logits", "tokens"]
    installed("internvl", "families", "internvl", "InternVL")
    bundle = Bundle.load(export_checkpoint(checkpoint, tmp_path / "bundle"))
    assert (bundle.family, bundle.vision.grid) == ("internvl", (2, 2))
    planned, counted = plan_checkpoint(checkpoint, (480, 640)), plan_bundle(str(tmp_path / "bundle"))
    assert planned.tower.tokens == counted.tower.tokens == 4
    assert planned.tower.parameters == pytest.approx(counted.tower.parameters, rel=0.03)
    model = Model.load(tmp_path / "bundle", threads=1)
    assert model.frame_text(1.5, 0) == ("Frame1: <img>", "</img>\n")
    assert answers(model)
    model.close()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_extension_leaves_gemmas_parts_to_onnxruntime(tmp_path: Path, precision: str) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    family = f"{EXAMPLES / 'gemma3.py'}:Gemma3"
    checkpoint = make_gemma(tmp_path / "checkpoint", **wide)
    model = Model.load(export_checkpoint(checkpoint, tmp_path / "bundle", family=family, precision=precision), threads=1)
    stream = watch(model, np.random.default_rng(0).standard_normal((2, 3, 56, 56), np.float32), 1.0, 2)
    assert model.engine._row_parts == [None] * (model.bundle.decoder.layers + 1)
    assert len(answer(model, stream, [5, 6], 2)[0]) == 2


def test_gemma_sees_whole_frames_and_windows_as_transformers_does(tmp_path: Path) -> None:
    import torch

    checkpoint, family = make_gemma(tmp_path / "checkpoint"), f"{EXAMPLES / 'gemma3.py'}:Gemma3"
    passed = check_family(family, checkpoint)
    assert [line.partition(":")[0] for line in passed] == ["export", "tower", "logits", "tokens"]
    model = Model.load(
        export_checkpoint(checkpoint, tmp_path / "bundle", family=family, kv="fp32", precision="fp32"), threads=1
    )
    pixels = np.random.default_rng(0).standard_normal((7, 3, 56, 56), np.float32)
    stream = watch(model, pixels, 1.0, 3)
    tokenizer, hf = model.tokenizer, load(checkpoint, "gemma3")
    place = hf.config.image_token_id
    before, after = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("<start_of_image>", "<end_of_image>\n\n")
    )
    suffix = tokenizer.encode("how many are there?", add_special_tokens=False).ids
    ids = [*Chat(model.bundle.chat, tokenizer).prefix, *[*before, *[place] * 4, *after] * len(pixels), *suffix]
    tokens, logits = answer(model, stream, suffix, 12)
    given = torch.tensor([[*ids, *tokens[:-1]]])
    with torch.no_grad():
        theirs = hf(input_ids=given, pixel_values=torch.from_numpy(pixels), token_type_ids=(given == place).int()).logits[0]
    expected = theirs[len(ids) - 1 :].numpy()
    assert tokens == expected.argmax(1).tolist()
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()
    stream.close()
    with Session.open(model, policy="hermes", budget=24, append="all") as session:
        for frame in np.random.default_rng(1).integers(0, 256, (12, 56, 56, 3), np.uint8):
            session.watch(frame)
        assert session.ask("how many are there?", max_tokens=4).text
        with pytest.raises(UserError, match="does not support time windows"):
            session.ask("how many?", since=0.0)
    with pytest.raises(UserError, match="policy rekv does not support the attention of gemma3"):
        Session.open(model, policy="rekv")
    with pytest.raises(UserError, match=r"not supported by tensorrt-10\.3"):
        export_checkpoint(checkpoint, tmp_path / "engine", family=family, profile="tensorrt-10.3")
    whole = tmp_path / "whole.py"
    whole.write_text("from edgevlm.extend import OnnxRuntimeCpu\nclass Whole(OnnxRuntimeCpu):\n    by_layer = False\n")
    with pytest.raises(UserError, match="window or whole-frame attention requires --engine onnxruntime-cpu"):
        Model.load(tmp_path / "bundle", engine=f"{whole}:Whole", threads=1)
    model.close()


def test_a_backbone_is_one_file(installed: Any, tmp_path: Path) -> None:
    own = "    backbone = GemmaDecoder(head_norms=True)\n"
    text = (EXAMPLES / "gemma3.py").read_text()
    file = tmp_path / "family.py"
    file.write_text(text.replace(own, ""))
    how: dict[str, Any] = {"family": f"{file}:Gemma3", "precision": "fp32"}
    checkpoint = make_gemma(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="text backbone 'gemma3_text' is not supported"):
        export_checkpoint(checkpoint, tmp_path / "bundle", **how)
    installed("my_backbone", "backbones", "gemma3_text", "DECODER", f"{text}\n\nDECODER = GemmaDecoder(head_norms=True)\n")
    assert Bundle.load(export_checkpoint(checkpoint, tmp_path / "bundle", **how)).decoder.windows == (9, 9, 0, 9)


def test_a_grid_that_is_not_the_towers_is_refused_at_export(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    text = (EXAMPLES / "internvl.py").read_text()
    file.write_text(text.replace("(tower.side // 2, tower.side // 2))", "(tower.side, tower.side))"))
    line = next(number for number, each in enumerate(text.splitlines(), 1) if each.startswith("class InternVL("))
    says = rf"its grid of 4 x 4 has 16 tokens, but its tower has 4; correct parts\(\) \({file}, line {line}\)"
    with pytest.raises(UserError, match=says):
        export_checkpoint(make_internvl(tmp_path / "checkpoint"), tmp_path / "bundle", family=f"{file}:InternVL")


def test_a_precision_is_one_file(exported: Any, installed: Any, tmp_path: Path) -> None:
    made = exported("llava_onevision", side=5, tied=True)
    installed("my_precision", "precisions", "int8-wide", "WIDE")
    bundle = export_checkpoint(made.checkpoint, tmp_path / "bundle", precision="int8-wide")
    planned = plan_checkpoint(made.checkpoint, (480, 640))
    columns, wide, half = (weights_of(planned, name, "cpu").layers for name in ("int8", "int8-wide", "fp16"))
    assert columns < wide < half
    with pytest.raises(UserError, match=r"--precision int8-wide is not supported by tensorrt-10\.3; use fp16 or fp32"):
        export_checkpoint(made.checkpoint, tmp_path / "engine", precision="int8-wide", profile="tensorrt-10.3")
    model = Model.load(bundle, threads=1)
    assert model.bundle.decoder.precision == "int8-wide"
    assert answers(model)
    model.close()


MIRRORED = """
import numpy as np
from edgevlm.extend import OnnxRuntimeCpu

class Mirrored(OnnxRuntimeCpu):
    def encode(self, pixels):
        return super().encode(np.ascontiguousarray(pixels[..., ::-1]))
"""


@pytest.mark.parametrize("by_name", [True, False])
def test_a_backend_is_one_file(exported: Any, installed: Any, by_name: bool) -> None:
    file = installed("my_engine", "engines", "mirrored", "Mirrored", MIRRORED)
    made = exported("llava_onevision", side=5, tied=True)
    model = Model.load(made.bundle, engine="mirrored" if by_name else f"{file}:Mirrored", threads=1)
    plain = Model.load(made.bundle, threads=1)
    pixels = np.random.default_rng(0).standard_normal((1, 3, *plain.bundle.vision.size)).astype(np.float32)
    assert np.array_equal(model.engine.encode(pixels), plain.engine.encode(np.ascontiguousarray(pixels[..., ::-1])))
    assert answers(model)
    for each in (model, plain):
        each.close()

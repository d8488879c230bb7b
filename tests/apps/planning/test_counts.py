"""A plan counts from config.json what an export of the same checkpoint writes."""

import json
import re
import shutil
from math import prod
from pathlib import Path

import pytest
from more_checkpoints import FRAME
from packed_checkpoints import make_packed
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edgevlm.apps.planning.formulas import weights_of
from edgevlm.apps.planning.model import plan_bundle, plan_checkpoint
from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle

CHECKPOINT = Path(__file__).parents[3] / "calib" / "demo" / "checkpoint"

SHAPES = {
    "llava": {"tower": "clip", "feature_layer": -2, "side": 6},
    "llava_next_video": {"tower": "clip", "feature_layer": -2},
    "llava_onevision": {"side": 5, "tied": True},
    "qwen2_vl": {},
    "qwen2_5_vl": {"depth": 3},
    "qwen3_vl": {},
    "smolvlm": {},
}
ALIGNMENT = 64  # of each tensor in a weights file


@pytest.fixture(scope="session", params=SHAPES)
def made(request, exported):
    found = exported(request.param, **SHAPES[request.param])
    return plan_checkpoint(found.checkpoint, FRAME), Bundle.load(found.bundle), plan_bundle(str(found.bundle))


def test_the_tower_has_as_many_numbers_as_the_checkpoint(made, exported):
    """Those that an export takes."""
    model = made[0]
    tower, used = model.tower, 0
    with safe_open(exported(model.family, **SHAPES[model.family]).checkpoint / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            block = re.search(r"encoder\.layers\.(\d+)\.", name)
            unused = model.family.startswith("llava") and "post_layernorm" in name
            if (
                re.search("visi|visual|projector|connector", name)
                and not unused
                and not (block and int(block[1]) >= tower.blocks)
            ):
                used += prod(tensors.get_slice(name).get_shape())
    assert tower.parameters == used


def test_a_bundle_has_the_sizes_of_its_files_and_says_whether_its_head_is_tied(made):
    model, bundle, of_bundle = made
    assert of_bundle.tied == model.tied
    stored = weights_of(of_bundle, "fp32", "cpu")
    sizes = {name: record.bytes for name, record in bundle.files.items()}
    assert stored.layers + stored.head == sizes["decoder.weights"]
    assert (stored.embedding, stored.tower) == (sizes["embedding.npy"], sizes["vision.weights"])
    assert (of_bundle.inner, of_bundle.matrices, of_bundle.vectors) == (model.inner, model.matrices, model.vectors)
    assert weights_of(of_bundle, "int4", "cpu").layers == weights_of(model, "int4", "cpu").layers


def test_a_rounded_bundle_says_of_itself_what_its_checkpoint_does(exported, tmp_path):
    """Its tower too, whose linears take a byte a weight, and not four."""
    made = exported("llava_onevision", side=5, tied=True)
    plain = plan_bundle(str(made.bundle))
    for precision, group in (("int8", None), ("int4-zp", 32)):
        folder = export_checkpoint(
            made.checkpoint, tmp_path / precision, precision=precision, vision_precision="int8", kv="fp16"
        )
        found = plan_bundle(str(folder))
        assert (found.inner, found.matrices, found.vectors, found.tied) == (plain.inner, plain.matrices, plain.vectors, True)
        assert (found.precision, found.kv, found.group, found.tower.precision) == (precision, "fp16", group, "int8")
        assert found.tower.parameters == pytest.approx(plain.tower.parameters, rel=0.02)
        if precision == "int8":  # TensorRT takes no zero points
            assert weights_of(found, precision, "jetson").layers == weights_of(plain, precision, "jetson").layers


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("left", [(), ("layers.1.self_attn.k_", "layers.2."), ("proj",)])
def test_a_checkpoint_that_was_rounded_already_is_planned_as_it_is_exported(exported, tmp_path, method, left):
    source = exported("llava", layers=3, heads=4, kv_heads=2, hidden=128, intermediate=256, head_dim=32, backbone="llama")
    folder, _ = make_packed(source.checkpoint, tmp_path / method, method, 64, left=left)
    model, bundle = plan_checkpoint(folder, FRAME), plan_bundle(str(export_checkpoint(folder, tmp_path / "out")))
    assert (model.precision, model.group) == ("int4-zp", 64)
    assert (bundle.precision, bundle.group) == ("int4-zp", None if left == ("proj",) else 64)
    assert (bundle.inner, bundle.matrices) == (model.inner, model.matrices)
    planned, stored = (weights_of(of, "int4-zp", "cpu") for of in (model, bundle))
    assert 0 <= stored.layers + stored.head - planned.layers - planned.head <= (model.layers * 16 + 3) * ALIGNMENT
    assert make_plan(PlanRequest(str(folder), "cpu")).line()["precision"] == "int4-zp"
    with pytest.raises(UserError, match="weights are already int4-zp; remove --precision"):
        make_plan(PlanRequest(str(folder), "cpu", precision="int8"))


@pytest.mark.parametrize(("stored", "tied"), [("other", False), ("same", True), ("alone", True)])
def test_a_head_is_tied_as_an_export_finds_it(exported, tmp_path, stored, tied):
    """The configuration says that it is."""
    folder = Path(shutil.copytree(exported("llava_onevision", side=5, tied=True).checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors["lm_head.weight"] = tensors[name][::-1].copy() if stored == "other" else tensors[name]
    if stored == "alone":
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, bundle = plan_checkpoint(folder, FRAME), plan_bundle(str(export_checkpoint(folder, tmp_path / "out")))
    assert model.tied == bundle.tied == tied
    assert weights_of(model, "fp32", "cpu").head == weights_of(bundle, "fp32", "cpu").head
    (folder / "model.safetensors").unlink()
    assert plan_checkpoint(folder, FRAME).tied


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llava_onevison"}, "is not supported, only llava, "),
        ({"text_config": {"model_type": "gpt2"}}, "text backbone 'gpt2' is not supported"),
        ({"vision_config": {"model_type": "siglip_vision_model", "hidden_size": None}}, "invalid or missing setting"),
        ({"text_config": []}, "text_config: Input should be an object"),
    ],
)
def test_what_no_plan_can_be_made_of_is_one_line(exported, tmp_path, change, says):
    config = json.loads((exported("llava_onevision", side=5, tied=True).checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=says) as error:
        plan_checkpoint(tmp_path, FRAME)
    assert "\n" not in str(error.value)

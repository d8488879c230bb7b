"""A plan counts from config.json what an export of the same checkpoint writes."""

import json
import re
import shutil
from math import prod
from pathlib import Path

import onnx
import pytest
from more_checkpoints import FRAME
from safetensors import safe_open

from edgevlm.apps.planning.bundle import plan_bundle
from edgevlm.apps.planning.checkpoint import plan_checkpoint
from edgevlm.apps.planning.weights import weights_of
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle

CHECKPOINT = Path(__file__).parents[3] / "apps" / "demo" / "checkpoint"

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


def test_the_decoder_is_that_of_the_bundle(made):
    model, bundle, _ = made
    spec = bundle.decoder
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "axes", "deepstack"):
        assert getattr(model, name) == getattr(spec, name), name
    assert model.limit == bundle.limit
    assert model.family == bundle.family
    assert model.closing == len(bundle.closing_rows())


def test_a_frame_is_that_of_the_bundle(made):
    model, bundle, of_bundle = made
    vision = bundle.vision
    assert (model.tower.tokens, model.tower.group, model.tower.size) == (vision.tokens_per_frame, vision.group, vision.size)
    assert bool(model.tower.text) == bool(vision.before + vision.after)
    assert of_bundle.tower.rows == vision.tokens_per_frame + of_bundle.tower.text


def test_the_weights_are_as_many_as_the_files_hold(made):
    model, bundle, _ = made
    counted = weights_of(model, "fp32", "cpu")
    sizes = {name: record.bytes for name, record in bundle.files.items()}
    tensors = model.layers * 12 + 2
    assert 0 <= sizes["decoder.weights"] - counted.layers - counted.head <= tensors * ALIGNMENT
    assert 0 <= sizes["embedding.npy"] - counted.embedding <= 128


def test_the_tower_has_as_many_numbers_as_the_checkpoint(made, exported):
    """Those that an export takes, and what it works out of them for a frame's size: rotary tables, and places."""
    model = made[0]
    tower, used = model.tower, 0
    with safe_open(exported(model.family, **SHAPES[model.family]).checkpoint / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            block = re.search(r"encoder\.layers\.(\d+)\.", name)
            unused = "pos_embed" in name or (model.family.startswith("llava") and "post_layernorm" in name)
            if (
                re.search("visi|visual|projector|connector", name)
                and not unused
                and not (block and int(block[1]) >= tower.blocks)
            ):
                used += prod(tensors.get_slice(name).get_shape())
    if model.family.startswith("qwen"):
        used += 2 * tower.patches * tower.width // tower.heads
    if model.family == "qwen3_vl":
        used += tower.patches * tower.width
    assert tower.parameters == used


def test_the_tower_has_about_as_many_numbers_as_its_graph(made):
    """The tracer stores norms that are alike, as all are at the start, once."""
    model, bundle, _ = made
    graph = onnx.load(bundle.file(bundle.vision.graph), load_external_data=False).graph
    numbers = sum(prod(tensor.dims) for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
    assert 0.97 * model.tower.parameters < numbers < 1.001 * model.tower.parameters


def test_a_bundle_has_the_sizes_of_its_files_and_says_whether_its_head_is_tied(made):
    model, bundle, of_bundle = made
    assert of_bundle.tied == model.tied
    stored = weights_of(of_bundle, "fp32", "cpu")
    sizes = {name: record.bytes for name, record in bundle.files.items()}
    assert stored.layers + stored.head == sizes["decoder.weights"]
    assert (stored.embedding, stored.tower) == (sizes["embedding.npy"], sizes["vision.weights"])
    assert of_bundle.inner == pytest.approx(model.inner, rel=0.1)
    smaller = weights_of(of_bundle, "int4", "cpu")
    assert smaller.layers == pytest.approx(weights_of(model, "int4", "cpu").layers, rel=0.15)


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the checkpoint is in the source tree only")
def test_the_demo_and_its_checkpoint_agree(tmp_path):
    bundle = plan_bundle("demo")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(CHECKPOINT / name, tmp_path)
    checkpoint = plan_checkpoint(tmp_path, (480, 640))
    assert checkpoint.inner == 384
    assert bundle.inner == pytest.approx(384, rel=0.01), "biases are counted among its matrices"
    counted, stored = weights_of(checkpoint, "fp32", "cpu"), weights_of(bundle, "fp32", "cpu")
    assert (counted.layers, counted.head) == (stored.layers, stored.head)
    assert 0.9 * stored.tower < counted.tower < stored.tower, "the tracer's file begins tensors at whole pages"
    assert (checkpoint.tower.tokens, checkpoint.limit) == (bundle.tower.tokens, bundle.limit) == (16, 2368)


def test_config_json_alone_will_do(exported, tmp_path):
    shutil.copy(exported("qwen2_5_vl", depth=3).checkpoint / "config.json", tmp_path)
    model = plan_checkpoint(tmp_path, (480, 640))
    assert model.tower.size == (476, 644)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llava_onevison"}, "nearest known is 'llava_onevision'"),
        ({"text_config": {"model_type": "gpt2"}}, "text backbone 'gpt2' cannot be exported"),
        ({"vision_config": {"model_type": "siglip_vision_model", "hidden_size": None}}, "cannot be understood"),
        ({"text_config": None}, "has no text_config"),
    ],
)
def test_what_no_plan_can_be_made_of_is_one_line(exported, tmp_path, change, says):
    config = json.loads((exported("llava_onevision", side=5, tied=True).checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=says) as error:
        plan_checkpoint(tmp_path, FRAME)
    assert "\n" not in str(error.value)

"""What a run chooses for a checkpoint: from its config.json, a described machine and the options. Nothing is exported."""

from types import SimpleNamespace

import pytest
from more_checkpoints import make_more
from planned import with_figures

from edgevlm.apps.bundles.resolve import ExportChoice
from edgevlm.apps.planning.plan import PlanRequest
from edgevlm.engines.devices import load_device
from edgevlm.runtime.bundle import PixelBudget

WIDE = (720, 1280)
SLOW = {"fp32_tflops": 1e-9, "int8_tops": 1e-7, "bandwidth_gb_s": 1e-4}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_more(tmp_path_factory.mktemp("choice") / "qwen2", "qwen2_vl")


def choice(shape=WIDE, frame_size=None, figures=None, **asked):
    said, looked = [], []

    def frame_shape():
        looked.append(shape)
        return shape

    device = with_figures(load_device("cpu"), **(figures or {}))
    made = ExportChoice(PlanRequest("m", **asked), frame_size, frame_shape, said.append, device)
    return made, said, looked


def test_a_small_model_on_a_fast_machine_stays_exact_and_is_of_the_cameras_shape(qwen):
    made, said, looked = choice()
    assert made.options(qwen) == {"precision": "fp32", "vision_precision": "fp32", "kv": "fp32"}
    assert made.size() == WIDE
    height, width = made.plan.roofline.model.tower.size
    assert width / height == pytest.approx(16 / 9, rel=0.1)
    assert looked == [WIDE]
    assert len(said) == 1
    assert f"chose fp32 weights, fp32 tower, fp32 keys and values, frames of {width}x{height}, budget" in said[0]
    assert "too few" not in said[0]


def test_what_falls_short_is_said_with_what_would_help(qwen):
    made, said, _ = choice(figures=SLOW)
    assert made.options(qwen)["precision"] == "int8"
    assert "too few: give --fps 0." in said[0]
    assert "or take a smaller model" in said[0]
    assert "\n" not in said[0]


def test_a_kept_bundle_is_what_was_asked_for_or_another_is_made(qwen):
    made, _, _ = choice()
    made.options(qwen)
    size = made.plan.roofline.model.tower.size
    spec = SimpleNamespace(precision="int4", kv="fp32")
    vision = SimpleNamespace(precision="fp32", size=size, pixels=None)
    kept = SimpleNamespace(decoder=spec, vision=vision, family="qwen2_vl", path="")
    assert made.suits(kept)
    assert not choice(precision="int8")[0].suits(kept)
    vision.size = (168, 224)
    assert not made.suits(kept)
    vision.pixels = PixelBudget(14, 1, 10**6)
    assert made.suits(kept)

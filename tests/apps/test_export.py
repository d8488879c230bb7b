"""Checkpoints of every family, precision and device: what is chosen for them, exported by the command and run on clips."""

import json
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from checkpoints import PLACES, make_checkpoint
from clips import clip
from fake_hub import FakeHub, endpoint_of, serving
from more_checkpoints import CLASSES, make_more
from planned import with_figures
from typed import edgevlm, events, of_kind, refused

from edgevlm.apps.bundles import gptq
from edgevlm.apps.bundles.build import target_for
from edgevlm.apps.bundles.resolve import ExportChoice
from edgevlm.apps.planning.plan import PlanRequest
from edgevlm.engines.devices import load_device
from edgevlm.export import decoder, vision
from edgevlm.export.precisions import rounding
from edgevlm.runtime.bundle import Bundle, PixelBudget
from edgevlm.runtime.graph_profiles import EngineShapes
from edgevlm.runtime.plugins import names

QUESTION = "how many are there now?"


@pytest.mark.parametrize("family", names("families"))
def test_each_family_is_exported_and_run_by_its_name_on_a_hub(family, tmp_path, monkeypatch):
    assert {*PLACES, *CLASSES} == {*names("families")}
    folder, name, hub = tmp_path / "checkpoint", f"shop/{family}", FakeHub()
    (make_more if family in CLASSES else make_checkpoint)(folder, family)
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "bundles"))
    with serving(hub) as url:
        hub.url = hub.cdn = url
        hub.add(name, folder)
        endpoint_of(url, tmp_path / "hf", monkeypatch)
        assert edgevlm("export", name, "--frame-size", "84x56").stdout.startswith(str(tmp_path / "bundles"))
    options = ["--video", clip("bikes.mp4"), "--ask", QUESTION, "--ask-at", f"2:{QUESTION}", "--budget", "64"]
    *found, summary = events("run", "--model", name, *options, "--frame-size", "84x56", "--json")  # the hub is gone
    assert [1.4 < answer["time_s"] <= 2 for answer in of_kind(found, "answer")] == [True, False]
    assert all(answer["token_ids"] for answer in of_kind(found, "answer"))
    assert summary["frames"] == 20
    assert summary["cache_tokens"] <= 64


def write_video(path, frames):
    first, *_ = frames
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 4.0, (first.shape[1], first.shape[0]))
    for frame in frames:
        writer.write(frame)
    writer.release()
    return path


def test_one_bundle_watches_frames_of_any_shape(tmp_path):
    """4:3, 16:9 and portrait without stretching, by path and, a fixed size asked for, stretched."""
    make_more(tmp_path / "checkpoint", "qwen2_5_vl")
    edgevlm("export", tmp_path / "checkpoint", "--out", tmp_path / "bundle", "--frame-size", "640x480")
    random, question = np.random.default_rng(0), ("--ask", QUESTION, "--json", "--policy", "full", "--append", "all")
    for width, height in ((128, 96), (256, 144), (72, 128)):
        small = random.integers(0, 256, (24, height // 8, width // 8, 3), np.uint8)
        video = write_video(tmp_path / f"{width}.avi", [np.kron(frame, np.ones((8, 8, 1), np.uint8)) for frame in small])
        *found, summary = events("run", "--model", tmp_path / "bundle", *question, "--video", video)
        assert summary["frames"] == 12
        assert summary["cache_tokens"] // 6 == round(height / 14) * round(width / 14)
        assert of_kind(found, "answer")[0]["token_ids"]
    assert events("run", "--model", tmp_path / "bundle", *question, "--video", video, "--frame-size", "256x144")


TOGETHER = {
    "int8 cache, int4 by GPTQ": ["--precision", "int4", "--rounding", "gptq", "--kv", "int8"],
    "all of int8": ["--precision", "int8", "--kv", "int8", "--vision-precision", "int8"],
}


@pytest.mark.parametrize("options", TOGETHER.values(), ids=TOGETHER)
def test_one_bundle_of_several_precisions_is_run_resumed_and_calibrated(options, tmp_path):
    frames = np.full((120, 64, 64, 3), 40, np.uint8)
    for index, frame in enumerate(frames):
        frame[index % 40 :][:20, 10:30] = (2 * index, 255 - 2 * index, 128)
    video, bundle = write_video(tmp_path / "square.avi", frames), tmp_path / "made" / "bundle"
    make_checkpoint(tmp_path / "checkpoint", "llava_onevision", max_positions=1024)
    assert edgevlm("export", tmp_path / "checkpoint", "--out", bundle, *options).stdout == f"{bundle}\n"
    assert list(bundle.parent.iterdir()) == [bundle], "nothing else is left"
    spec = Bundle.load(bundle).decoder
    assert (spec.precision, spec.kv, spec.rounding) == (options[1], "int8", "gptq" if "gptq" in options else "nearest")
    asked = ("run", "--video", video, "--model", bundle, "--ask", "what is it?", "--json")
    *found, summary = events(*asked, "--budget", 160, "--policy", "purekv:st_spattn=on", "--state", tmp_path / "state")
    assert len(of_kind(found, "answer")) == 1
    assert summary["compressions"] > 0
    found = events("calibrate", bundle, "--video", video, "--policies", "uniform,last-seen", "--budget", "25%", "--json")
    (choice,) = of_kind(found, "choice")
    assert len(of_kind(found, "append_choice", "encode_choice")) == 2
    *_, summary = events(*asked, "--budget", choice["budget"])
    assert summary["policy"] == choice["policy"], "auto"


SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}
PROBE = 8  # rows, at the most, of what shows how a layout lies in files
LAYER, TEXT = "decoder layer 3 of 3", "running the model over text"
STAGES = {  # (the step that it is stopped at, and at what time of it), then what is done again: towers, samples, layers rounded
    "the fp32 bundle": ((LAYER, 1), (1, 1, [0, 1, 2])),
    "its run over text": ((TEXT, 1), (1, 1, [0, 1, 2])),
    "the rounded bundle": ((LAYER, 2), (0, 0, [2])),
}


def export(checkpoint, out, stop=("", 0), notify=None):
    """Export by GPTQ, until a step begins for the given time."""
    steps = []

    def progress(step):
        steps.append(step)
        if (step, steps.count(step)) == stop:
            raise KeyboardInterrupt

    return gptq.export_by_gptq(checkpoint, out, precision="int4-zp", progress=progress, force=False, notify=notify)


def watched(monkeypatch, module, name, of=lambda *arguments: arguments):
    """What is made ``of`` the arguments of each call of a function that is left as it is."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: (calls.append(of(*given)), function(*given, **named))[1])
    return calls


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(exported, tmp_path_factory):
    return export(exported("llava", **SHAPE).checkpoint, tmp_path_factory.mktemp("rounded") / "out")


@pytest.mark.parametrize(("stop", "again"), STAGES.values(), ids=STAGES)
def test_gptq_goes_on_where_it_was_stopped(exported, undisturbed, tmp_path, monkeypatch, stop, again):
    checkpoint, said = exported("llava", **SHAPE).checkpoint, []
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "out", stop, said.append)
    assert said == ["stopped; run the same command to continue"]
    assert len(list(tmp_path.iterdir())) == 1
    towers = watched(monkeypatch, vision, "write_vision")
    samples = watched(monkeypatch, gptq.activations, "sample_activations")
    layers = watched(monkeypatch, decoder, "_stored", lambda read, layer, layout, rows, turned, done: (layer, rows, done))
    rounded = watched(monkeypatch, rounding, "gptq", lambda weight, *_: weight)
    export(checkpoint, tmp_path / "out", notify=said.append)
    assert said[1] == "continuing the export that was stopped"
    again_rounded = [layer for layer, rows, done in layers if rows is not None and not done]
    assert (len(towers), len(samples), again_rounded) == again
    assert all(weight.any() for weight in rounded if len(weight) > PROBE), "zeros of a finished layer"
    assert contents(tmp_path / "out") == contents(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# what a run chooses for a checkpoint: from its config.json, a described machine and the options

WIDE = (720, 1280)
SLOW = {"fp32_tflops": 1e-9, "int8_tops": 1e-7, "bandwidth_gb_s": 1e-4}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_more(tmp_path_factory.mktemp("choice") / "qwen2", "qwen2_vl")


def choice(figures=None, **asked):
    said, shapes = [], iter([WIDE])  # the source is looked at once
    device = with_figures(load_device("cpu"), **(figures or {}))
    return ExportChoice(PlanRequest("m", **asked), None, lambda: next(shapes), said.append, device), said


def test_a_small_model_on_a_fast_machine_stays_exact_and_is_of_the_cameras_shape(qwen):
    made, said = choice()
    assert made.options(qwen) == {"precision": "fp32", "vision_precision": "fp32", "kv": "fp16"}
    assert made.size == WIDE
    height, width = made.plan.roofline.model.tower.size
    assert width / height == pytest.approx(16 / 9, rel=0.1)
    assert len(said) == 1
    assert f"chose fp32 weights, fp32 tower, fp16 keys and values, frames of {width}x{height}, budget" in said[0]
    slow, said = choice(SLOW)
    assert slow.options(qwen)["precision"] == "int8"
    assert "too few; use --fps 0." in said[0], "what would help"


def test_a_cached_bundle_is_what_was_asked_for_or_another_is_made(qwen):
    made, _ = choice()
    made.options(qwen)
    spec = SimpleNamespace(precision="int4", kv="fp32")
    tower = SimpleNamespace(precision="fp32", size=made.plan.roofline.model.tower.size, pixels=None)
    cached = SimpleNamespace(decoder=spec, vision=tower, family="qwen2_vl", path="")
    assert made.suits(cached)
    assert not choice(precision="int8")[0].suits(cached)
    tower.size = (168, 224)
    assert not made.suits(cached)
    tower.pixels = PixelBudget(14, 1, 10**6)
    assert made.suits(cached)


# --device: the profile of the device's TensorRT, and weights that fit it

CAMERA = (480, 640)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("device") / "checkpoint", "llava_onevision", side=3)


@pytest.mark.parametrize(
    ("device", "jetpack", "profile", "precision", "kv"),
    [
        ("orin-nano-8", None, "tensorrt-10.15", "fp16", "fp16"),
        ("orin-agx-64", "6.2", "tensorrt-10.3", "fp16", "fp16"),
        ("cpu", None, "onnxruntime", None, "fp16"),
        ("cuda", None, "onnxruntime", None, "fp16"),
    ],
)
def test_what_a_device_wants(checkpoint, device, jetpack, profile, precision, kv):
    target = target_for(checkpoint, device, jetpack, None, None, CAMERA)
    assert (target.profile, target.precision, target.kv) == (profile, precision, kv)
    assert profile in target.line


def test_weights_are_rounded_until_they_fit(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "head_dim": 128}
    chosen = []
    for layers in (16, 56, 100, 400):
        config["text_config"] |= sizes | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        chosen.append(target_for(tmp_path, "orin-nano-8", None, None, None, CAMERA).precision)
    assert chosen == ["fp16", "int8", "int4", "int4"]


def test_a_bundle_for_a_device_needs_its_engines(checkpoint, tmp_path):
    out = tmp_path / "bundle"
    done = edgevlm("export", checkpoint, "--out", out, "--device", "orin-nano-8", "--jetpack", "6.2", "--precision", "int4")
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert "orin-nano-8 with JetPack 6.2, TensorRT 10.3: profile tensorrt-10.3, int4 weights, fp16 keys" in done.stderr
    bundle = Bundle.load(out)
    assert (bundle.profile, bundle.decoder.precision, bundle.decoder.kv) == ("tensorrt-10.3", "int4", "fp16")
    assert bundle.shapes == EngineShapes(8, 8 * bundle.vision.tokens_per_frame, 512)
    assert f"{out}: was exported for tensorrt-10.3; build its engines (edgevlm build {out})" in refused("run", "--model", out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--jetpack", "6.2"], "--jetpack requires --device; add --device"),
        (["--precision", "int44"], "unknown --precision 'int44'; did you mean 'int4'?"),
        (
            ["--rounding", "gptq"],
            "--rounding gptq requires an integer precision, not fp32; add --precision int4, int4-zp or int8",
        ),
    ],
)
def test_what_an_export_refuses_is_one_line(checkpoint, tmp_path, options, says):
    assert refused("export", checkpoint, "--out", tmp_path / "out", *options) == f"edgevlm: {says}\n"
    assert not (tmp_path / "out").exists()

"""``edgevlm export --device``: the profile of the device's TensorRT, and weights that fit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from typed import edgevlm

from edgevlm.apps.bundles.build import target_for
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.graph_profiles import EngineShapes

CAMERA = (480, 640)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("device") / "checkpoint", "llava_onevision", side=3)


@pytest.mark.parametrize(
    ("device", "jetpack", "profile", "precision", "kv"),
    [
        ("orin-nano-8", None, "tensorrt-10.15", "fp16", "fp16"),
        ("orin-agx-64", "6.2", "tensorrt-10.3", "fp16", "fp16"),
        ("cpu", None, "onnxruntime", None, "fp32"),
        ("cuda", None, "onnxruntime", None, "fp16"),
    ],
)
def test_what_a_device_wants(
    checkpoint: Path, device: str, jetpack: str | None, profile: str, precision: str | None, kv: str
) -> None:
    target = target_for(checkpoint, device, jetpack, None, None, CAMERA)
    assert (target.profile, target.precision, target.kv) == (profile, precision, kv)
    assert profile in target.line


def test_weights_are_rounded_until_they_fit(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "head_dim": 128}
    chosen = []
    for layers in (16, 56, 100, 400):
        config["text_config"] |= sizes | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        chosen.append(target_for(tmp_path, "orin-nano-8", None, None, None, CAMERA).precision)
    assert chosen == ["fp16", "int8", "int4", "int4"]


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    done = edgevlm("export", checkpoint, "--out", out, "--device", "orin-nano-8", "--jetpack", "6.2", "--precision", "int4")
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert "orin-nano-8 with JetPack 6.2, TensorRT 10.3: profile tensorrt-10.3, int4 weights, fp16 keys" in done.stderr
    bundle = Bundle.load(out)
    assert (bundle.profile, bundle.decoder.precision, bundle.decoder.kv) == ("tensorrt-10.3", "int4", "fp16")
    assert bundle.shapes == EngineShapes(8, 8 * bundle.vision.tokens_per_frame, 512)
    done = edgevlm("run", "--model", out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"edgevlm: {out}: is for tensorrt-10.3; build its engines (edgevlm build {out})")
    assert done.stderr.count("\n") == 1
    done = edgevlm("export", checkpoint, "--jetpack", "6.2")
    assert (done.returncode, done.stderr) == (2, "edgevlm: --jetpack goes with --device; give both\n")

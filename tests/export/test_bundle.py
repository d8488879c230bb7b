"""A bundle is read whole or not at all: every kind of damage is one line that names the file and the way out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgevlm.errors import BundleError
from edgevlm.runtime.bundle import Bundle, hash_file, seal_manifest
from edgevlm.runtime.model import Model

FILES = [
    *("bundle.json", "closing.npy", "decoder-st-spattn.onnx", "decoder.onnx", "decoder.weights"),
    *("embedding.npy", "tokenizer.json", "vision-changed.onnx", "vision.onnx", "vision.weights"),
    *(f"decoder-per-layer-{index}.onnx" for index in range(4)),
]


@pytest.fixture
def folder(exported: Any, tmp_path: Path) -> Path:
    made = exported("llava_onevision", layers=3, heads=6, kv_heads=2, side=5, trained_length=1000)
    return Path(shutil.copytree(made.bundle, tmp_path / "bundle"))


def refused(folder: Path, name: str, **options: Any) -> str:
    with pytest.raises(BundleError) as error:
        Bundle.load(folder, **options)
    message = str(error.value)
    assert "\n" not in message
    assert name in message
    assert "edgevlm export" in message
    return message


def test_what_a_bundle_says(folder: Path) -> None:
    bundle = Bundle.load(folder)
    assert sorted(FILES) == sorted(path.name for path in folder.iterdir())
    assert sorted(bundle.files) == sorted(set(FILES) - {"bundle.json"})
    d, v, c = bundle.decoder, bundle.vision, bundle.chat
    assert (d.layers, d.heads, d.kv_heads, d.head_dim, d.hidden) == (3, 6, 2, 16, 96)
    assert (d.model_limit, d.trained_length, bundle.limit) == (4096, 1000, 1000)
    assert (v.size, v.grid, v.tokens_per_frame, v.fit, v.resample) == ((70, 70), (3, 3), 9, "stretch", "bicubic")
    assert (c.content_type, c.placeholder) == ("video", "<video>")
    assert c.special_tokens["eos_token"] == "<|im_end|>"
    assert (bundle.family, bundle.source) == ("llava_onevision", "checkpoint")
    assert bundle.closing_rows().shape == (1, 96)
    assert bundle.inv_freq.dtype == np.float32
    assert len(bundle.inv_freq) == 8
    assert len(c.stop_ids) == 1


def test_inv_freq_is_bit_for_bit_transformers(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    rope = {"rope_theta": 1e6, "rope_type": "default"}
    config = Qwen2Config(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, rope_parameters=rope)
    expected = Qwen2RotaryEmbedding(config).inv_freq
    assert torch.equal(torch.from_numpy(Bundle.load(folder).inv_freq), expected)


@pytest.mark.parametrize("name", FILES)
def test_truncated(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, name)
    refused(folder, name, verify="size")
    path.write_bytes(b"")
    refused(folder, name)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()
    for place in {0, len(whole) // 2, len(whole) - 1, *np.random.default_rng(0).integers(len(whole), size=20).tolist()}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        refused(folder, name)
    path.write_bytes(whole)
    Bundle.load(folder)


def test_every_byte_of_the_manifest_counts(folder: Path) -> None:
    path = folder / "bundle.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BundleError):
            Bundle.load(folder, verify="size")


def reseal(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    manifest = json.loads((folder / "bundle.json").read_bytes())
    change(manifest)
    (folder / "bundle.json").write_bytes(seal_manifest(manifest))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_a_path_that_leaves_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_text("x")
    reseal(lambda m: m["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}), folder)
    assert "outside the bundle" in refused(folder, "bundle.json")


def test_a_link_that_leaves_the_folder(folder: Path) -> None:
    shutil.move(folder / "decoder.weights", folder.parent / "elsewhere")
    (folder / "decoder.weights").symlink_to(folder.parent / "elsewhere")
    assert "outside the bundle" in refused(folder, "decoder.weights")


WRONG: list[tuple[str, Any]] = [
    ("decoder.graphs", {"st-spattn": 0}),
    ("decoder.embedding", float("nan")),
    ("decoder.kv_heads", {}),
    ("decoder.hidden", "../../../etc/passwd"),
    ("decoder.layers", 2**31),
    ("decoder.layers", 2),
    ("decoder.vocab", 10**40),
    ("decoder.graphs", []),
    ("decoder.head_dim", True),
    ("decoder.fading", ["1/2", "x" * 100_000]),
    ("vision.mean", 2**63),
    ("vision.std", [0.5, 0, 0.5]),
    ("vision.size", [1, 70]),
    ("vision.grid", [9, 9]),
    ("vision.closing", "../../etc/passwd"),
    ("chat.special_tokens", float("inf")),
    ("chat.special_tokens", {"messages": "x"}),
    ("chat.template", {}),
    ("chat.stop_ids", [10**6]),
    ("files.decoder.onnx", {"bytes": float("inf"), "sha256": ""}),
]


@pytest.mark.parametrize(("place", "value"), WRONG, ids=str)
def test_a_manifest_with_another_value(folder: Path, place: str, value: Any) -> None:
    """Its checksum is right; what loads a model allocates nothing that the manifest asks for and the graphs do not."""
    manifest = json.loads((folder / "bundle.json").read_bytes())
    section, _, key = place.partition(".")
    manifest[section][key] = value
    raw = json.dumps(manifest | {"checksum": "0" * 64})
    (folder / "bundle.json").write_text(raw.replace("0" * 64, hashlib.sha256(raw.encode()).hexdigest()))
    with pytest.raises(BundleError) as error:
        Model.load(folder)
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bundle.json", "decoder.onnx", "tokenizer.json"])
def test_a_pipe_is_not_read(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, name)


def rewritten(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    record = hash_file(folder / name)
    reseal(lambda m: m["files"].update({name: {"bytes": record.bytes, "sha256": record.sha256}}), folder)

"""GGUF files: the numbers that safetensors hold, and what is no such file refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.gguf import GgufCheckpoint

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

SHAPE = {"layers": 2, "heads": 6, "kv_heads": 2, "hidden": 192, "intermediate": 128, "head_dim": 32, "family": "llava"}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def write(checkpoint: Path, path: Path, arch: str, kind: str = "F32", **changes: Any) -> Path:
    """The text half of a checkpoint as llama.cpp's converter writes it: rows of Llama's queries and keys permuted."""
    config = json.loads((checkpoint / "config.json").read_text())["text_config"]
    writer, quant = gguf.GGUFWriter(path, arch), gguf.GGMLQuantizationType[kind]
    settings = {
        "block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    } | changes  # fmt: skip
    for name, value in settings.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_uint32(f"{arch}.context_length", config["max_position_embeddings"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_parameters"]["rope_theta"])
    source = Checkpoint(checkpoint)
    for name in sorted(name for name in source.tensors if name.startswith("text.")):
        shape = source.tensors[name].shape
        array = source.tensor(name, shape)
        part, what = name.removeprefix("text.").rsplit(".", 1)
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        which = part.partition("self_attn.")[2].removesuffix("_proj")
        if arch == "llama" and which in heads:
            array = array.reshape(heads[which], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        place = f"blk.{part.split('.')[1]}.{NAMES[part.split('.', 2)[2]]}" if part.startswith("layers.") else NAMES[part]
        packed = gguf.quants.quantize(array, quant) if array.ndim > 1 and kind != "F32" else array
        writer.add_tensor(f"{place}.{what}", packed, raw_dtype=quant if array.ndim > 1 and kind != "F32" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("backbone", ["llama", "qwen2", "qwen3"])
def test_the_same_numbers_as_from_safetensors(exported: Any, tmp_path: Path, backbone: str) -> None:
    source = Checkpoint(exported(**SHAPE, backbone=backbone).checkpoint)
    found = GgufCheckpoint(write(source.folder, tmp_path / "text.gguf", backbone))
    assert found.tensors.keys() == {name for name in source.tensors if name.startswith("text.")}
    for name, tensor in found.tensors.items():
        assert np.array_equal(found.tensor(name, tensor.shape), source.tensor(name, tensor.shape)), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_slices_are_dequantised_as_the_whole_is(exported: Any, tmp_path: Path, kind: str) -> None:
    """The reference: the package's own dequantisation of the whole tensor, then the rows put back in order."""
    checkpoint = exported(**SHAPE, backbone="llama").checkpoint
    file = write(checkpoint, tmp_path / "text.gguf", "llama", kind)
    source, tensors = Checkpoint(checkpoint), GgufCheckpoint(file).tensors
    whole = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
    query, key = (tensors[f"text.layers.1.self_attn.{part}_proj.weight"] for part in "qk")
    for tensor, heads, name in ((query, 6, "attn_q"), (key, 2, "attn_k")):
        expected = whole[f"blk.1.{name}.weight"].reshape(heads, -1, 2, 192).swapaxes(1, 2).reshape(tensor.shape)
        for start, stop in ((0, tensor.shape[0]), (5, 23)):
            assert np.array_equal(tensor.rows(start, stop), expected[start:stop])
        original = source.tensor(f"text.layers.1.self_attn.{name[-1]}_proj.weight", tensor.shape)
        assert np.abs(expected - original).max() < 0.1 * np.abs(original).max()
    table = tensors["text.embed_tokens.weight"]
    assert np.array_equal(table.rows(3, 9), whole["token_embd.weight"][3:9])


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def endless(path: Path) -> None:
    """An array of more numbers than a file could hold, found by Atheris: the package took 2 GB and half a minute for it."""
    key = (20).to_bytes(8, "little") + b"general.architecture"
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (2_400_000).to_bytes(8, "little")
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(8) + (1).to_bytes(8, "little") + key + array)


CASES: list[tuple[str, dict[str, Any], Any, str]] = [
    ("gemma2", {}, None, "architecture 'gemma2' is not supported, only llama, qwen2, qwen3"),
    ("llama", {"attention.head_count": 7}, None, "cannot be split into 7 heads"),
    ("llama", {}, damaged, "is damaged or truncated"),
    ("llama", {}, endless, "truncated field"),
    ("llama", {}, lambda path: path.unlink(), "is not a file"),
]


@pytest.mark.parametrize(("arch", "changes", "damage", "message"), CASES, ids=[case[3][:24] for case in CASES])
def test_another_file_is_refused(
    exported: Any, tmp_path: Path, arch: str, changes: dict[str, Any], damage: Any, message: str
) -> None:
    file = write(exported(**SHAPE, backbone="llama").checkpoint, tmp_path / "text.gguf", arch, **changes)
    if damage is not None:
        damage(file)
    with pytest.raises(UserError, match=message) as error:
        GgufCheckpoint(file)
    assert "\n" not in str(error.value)

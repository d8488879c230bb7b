"""GGUF text halves: the tensors that transformers reads from the same file, and what is no such file refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.gguf import _order, text_tensors
from edgevlm.runtime.bundle import Bundle

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
def test_the_same_bytes_as_from_safetensors(exported: Any, tmp_path: Path, backbone: str) -> None:
    made = exported(**SHAPE, backbone=backbone)
    file = write(made.checkpoint, tmp_path / "text.gguf", backbone)
    bundle = export_checkpoint(made.checkpoint, tmp_path / "out", text_gguf=file, camera=(56, 84))
    for name in ("decoder.weights", "embedding.npy", "decoder.onnx"):
        assert (bundle / name).read_bytes() == (made.bundle / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_slices_are_dequantised_as_the_whole_is(exported: Any, tmp_path: Path, kind: str) -> None:
    """The reference: the package's own dequantisation of the whole tensor, then the rows put back in order."""
    checkpoint = exported(**SHAPE, backbone="llama").checkpoint
    file = write(checkpoint, tmp_path / "text.gguf", "llama", kind)
    source = Checkpoint(checkpoint)
    tensors = text_tensors(file, source.section("text_config"))
    whole = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
    query, key = (tensors[f"text.layers.1.self_attn.{part}_proj.weight"] for part in "qk")
    for tensor, heads, name in ((query, 6, "attn_q"), (key, 2, "attn_k")):
        expected = whole[f"blk.1.{name}.weight"].reshape(heads, -1, 2, 192).swapaxes(1, 2).reshape(tensor.shape)
        assert tensor.tensor.tensor_type.name == kind
        for start, stop in ((0, tensor.shape[0]), (5, 23)):
            assert np.array_equal(tensor.rows(start, stop), expected[start:stop])
        original = source.tensor(f"text.layers.1.self_attn.{name[-1]}_proj.weight", tensor.shape)
        assert np.abs(expected - original).max() < 0.1 * np.abs(original).max()
    table = tensors["text.embed_tokens.weight"]
    assert np.array_equal(table.rows(3, 9), whole["token_embd.weight"][3:9])


def test_the_precision_is_the_one_asked_for_whatever_the_checkpoint_was_rounded_to(exported: Any, tmp_path: Path) -> None:
    """An AWQ checkpoint gives its tower and configuration alone."""
    made = exported(**SHAPE, backbone="qwen2")
    file = write(made.checkpoint, tmp_path / "text.gguf", "qwen2")
    folder = Path(shutil.copytree(made.checkpoint, tmp_path / "checkpoint"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config))
    for precision in (None, "int8"):
        bundle = export_checkpoint(folder, tmp_path / "out", text_gguf=file, camera=(56, 84), precision=precision, force=True)
        assert Bundle.load(bundle).decoder.precision == (precision or "fp32")
        same = (bundle / "decoder.weights").read_bytes() == (made.bundle / "decoder.weights").read_bytes()
        assert same is (precision is None)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def endless(path: Path) -> None:
    """An array of more numbers than a file could hold, found by Atheris: the package took 2 GB and half a minute for it."""
    key = (20).to_bytes(8, "little") + b"general.architecture"
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (2_400_000).to_bytes(8, "little")
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(8) + (1).to_bytes(8, "little") + key + array)


CASES: list[tuple[str, dict[str, Any], Any, str]] = [
    ("gemma2", {}, None, "architecture 'gemma2' cannot be read; GGUF is read of llama, qwen2, qwen3"),
    ("qwen2", {}, None, "is of architecture qwen2 and config.json's text_config is llama"),
    ("llama", {"attention.head_count": 3}, None, "llama.attention.head_count is 3 and config.json's num_attention_heads is 6"),
    ("llama", {"block_count": 7}, None, "llama.block_count is 7 and config.json's num_hidden_layers is 2"),
    ("llama", {}, damaged, "is damaged or truncated"),
    ("llama", {}, endless, "it ends within a field"),
    ("llama", {}, lambda path: path.write_text("x"), "is no GGUF file"),
    ("llama", {}, lambda path: path.unlink(), "is no file"),
]


@pytest.mark.parametrize(("arch", "changes", "damage", "message"), CASES, ids=[case[3][:24] for case in CASES])
def test_another_file_is_refused(
    exported: Any, tmp_path: Path, arch: str, changes: dict[str, Any], damage: Any, message: str
) -> None:
    checkpoint = exported(**SHAPE, backbone="llama").checkpoint
    file = write(checkpoint, tmp_path / "text.gguf", arch, **changes)
    if damage is not None:
        damage(file)
    with pytest.raises(UserError, match=message) as error:
        export_checkpoint(checkpoint, tmp_path / "out" / "bundle", text_gguf=file)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_vision_half_alone_is_enough_beside_it(exported: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made = exported(**SHAPE, backbone="qwen2")
    file = write(made.checkpoint, tmp_path / "text.gguf", "qwen2")
    folder = Path(shutil.copytree(made.checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    vision = {name: tensor for name, tensor in tensors.items() if "language_model" not in name}
    assert 0 < len(vision) < len(tensors)
    save_file(vision, folder / "model.safetensors", metadata={"format": "pt"})
    bundle = export_checkpoint(folder, tmp_path / "out", text_gguf=file, camera=(56, 84))
    assert (bundle / "decoder.weights").read_bytes() == (made.bundle / "decoder.weights").read_bytes()


def test_a_tensor_without_a_shape_is_refused() -> None:
    """Found by Atheris: an IndexError."""
    with pytest.raises(UserError, match=r"'blk\.0\.attn_q\.weight' has 1 rows, which are not 6 heads"):
        _order(Path("text.gguf"), SimpleNamespace(name="blk.0.attn_q.weight", shape=np.array([], np.uint64)), 6)

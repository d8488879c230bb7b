"""The same tensors as the GGUF file that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray

from edgevlm.bench.runtimes.text_model import TextModel
from edgevlm.export.backbones import DecoderShape

# precision -> (matrices of the layers, embedding and head): what an export of that precision has
KINDS = {
    "fp32": (Kind.F32, Kind.F32),
    "fp16": (Kind.F16, Kind.F16),
    "int8": (Kind.Q8_0, Kind.Q8_0),
    "int4": (Kind.Q4_0, Kind.Q8_0),
}
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def write_gguf(path: Path, model: TextModel, precision: str) -> None:
    """Write ``model`` without a tokenizer; its rows are rounded as ``precision`` says, blocks of 32 for whole numbers."""
    s, writer = model.shape, gguf.GGUFWriter(path, model.backbone)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(s.vocab)
    writer.add_context_length(s.model_limit)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.intermediate)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_layer_norm_rms_eps(s.norm_eps)
    matrices, table = KINDS[precision]
    for name, array in _tensors(model):
        is_table = name in ("token_embd.weight", "output.weight")
        kind = Kind.F32 if array.ndim == 1 else table if is_table else matrices
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: TextModel) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name in the file and numbers of every tensor."""
    s, tensor = model.shape, model.tensors.tensor
    yield "token_embd.weight", tensor("text.embed_tokens.weight", (s.vocab, s.hidden))
    yield "output_norm.weight", tensor("text.norm.weight", (s.hidden,))
    if not s.tied:
        yield "output.weight", tensor(model.head, (s.vocab, s.hidden))
    sizes = _sizes(s)
    biases = ("q", "k", "v") if model.backbone == "qwen2" else s.biases
    for layer in range(s.layers):
        ours, theirs = f"text.layers.{layer}", f"blk.{layer}"
        for part, name in PARTS.items():
            weight = tensor(f"{ours}.{part}.weight", sizes[part])
            yield f"{theirs}.{name}.weight", _turned(model, part, weight)
            if part.rpartition(".")[2].removesuffix("_proj") in biases:
                yield f"{theirs}.{name}.bias", _turned(model, part, tensor(f"{ours}.{part}.bias", sizes[part][:1]))
        for part, name in NORMS.items():
            yield f"{theirs}.{name}.weight", tensor(f"{ours}.{part}.weight", (s.hidden,))
        for part, name in HEAD_NORMS.items() if s.head_norms else ():
            yield f"{theirs}.{name}.weight", tensor(f"{ours}.{part}.weight", (s.head_dim,))


def _sizes(s: DecoderShape) -> dict[str, tuple[int, int]]:
    queries = s.heads * s.head_dim
    attention = [(queries, s.hidden), (s.kv_size, s.hidden), (s.kv_size, s.hidden), (s.hidden, queries)]
    mlp = [(s.intermediate, s.hidden), (s.intermediate, s.hidden), (s.hidden, s.intermediate)]
    return dict(zip(PARTS, attention + mlp, strict=True))


def _turned(model: TextModel, part: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of a llama's queries and keys in the order in which llama.cpp rotates neighbours instead of halves."""
    if model.backbone != "llama" or part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return rows
    halves = rows.reshape(-1, 2, model.shape.head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))

"""Run llama.cpp through llama-cpp-python on a GGUF file of the same tensors, with a float32, float16 or Q8_0 KV cache."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import llama_cpp as lib
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray

from edgevlm.bench.seeded import TextModel
from edgevlm.errors import UserError

BATCH = 512
KV = {"fp32": Kind.F32, "fp16": Kind.F16, "int8": Kind.Q8_0}
# precision -> types of the layers' matrices and of embedding and head, as in an export
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
_silence = lib.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """llama.cpp as a :class:`~edgevlm.bench.speed.runtimes.Runtime`. The KV cache is filled with decoded tokens, not noise."""

    def __init__(self, model: TextModel, precision: str, threads: int, capacity: int, kv: str) -> None:
        lib.llama_log_set(_silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._vocab, self._held = model.shape.vocab, 0
        with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(path, model, precision)
            self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if self._model is None:
            raise UserError(f"llama.cpp {lib.__version__} cannot load {model.name}; remove it from --against")
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = capacity, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = int(KV[kv])
        self._context: Any = lib.llama_init_from_model(self._model, settings)
        self._memory = lib.llama_get_memory(self._context)

    def hold(self, rows: int) -> None:
        lib.llama_memory_seq_rm(self._memory, 0, 0, -1)
        for start in range(0, rows, BATCH):
            self._decode([0] * min(BATCH, rows - start))
        self._held = rows

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        for start in range(0, len(ids), BATCH):
            self._decode(ids[start : start + BATCH])
        if not scores:
            return None
        return np.ctypeslib.as_array(lib.llama_get_logits(self._context), (self._vocab,)).copy()

    def forget(self) -> None:
        lib.llama_memory_seq_rm(self._memory, 0, self._held, -1)

    def close(self) -> None:
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    def _decode(self, ids: Sequence[int]) -> None:
        tokens = (lib.llama_token * len(ids))(*ids)
        if failed := lib.llama_decode(self._context, lib.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"llama_decode failed on {len(ids)} tokens: {failed}")


def write_gguf(path: Path, model: TextModel, precision: str) -> None:
    """Write a model to a GGUF file without a tokenizer. Integer weights are stored in blocks of 32."""
    s, writer = model.shape, gguf.GGUFWriter(path, model.backbone)
    writer.add_tokenizer_model("none")
    sizes = {
        "vocab_size": s.vocab, "context_length": s.model_limit, "embedding_length": s.hidden, "block_count": s.layers,
        "feed_forward_length": s.intermediate, "head_count": s.heads, "head_count_kv": s.kv_heads, "key_length": s.head_dim,
        "value_length": s.head_dim, "rope_dimension_count": s.head_dim, "rope_freq_base": s.rope_theta,
        "layer_norm_rms_eps": s.norm_eps,
    }  # fmt: skip
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
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
    s, tensor = model.shape, model.tensors.tensor
    yield "token_embd.weight", tensor("text.embed_tokens.weight", (s.vocab, s.hidden))
    yield "output_norm.weight", tensor("text.norm.weight", (s.hidden,))
    if not s.tied:
        yield "output.weight", tensor(model.head, (s.vocab, s.hidden))
    queries, biases = s.heads * s.head_dim, ("q", "k", "v") if model.backbone == "qwen2" else s.biases
    attention = [(queries, s.hidden), (s.kv_size, s.hidden), (s.kv_size, s.hidden), (s.hidden, queries)]
    sizes = [*attention, (s.intermediate, s.hidden), (s.intermediate, s.hidden), (s.hidden, s.intermediate)]
    for layer in range(s.layers):
        ours, theirs = f"text.layers.{layer}", f"blk.{layer}"
        for (part, name), size in zip(PARTS.items(), sizes, strict=True):
            yield f"{theirs}.{name}.weight", _llama_order(model, part, tensor(f"{ours}.{part}.weight", size))
            if part.rpartition(".")[2].removesuffix("_proj") in biases:
                yield f"{theirs}.{name}.bias", _llama_order(model, part, tensor(f"{ours}.{part}.bias", size[:1]))
        norms = [(part, name, s.hidden) for part, name in NORMS.items()]
        norms += [(part, name, s.head_dim) for part, name in HEAD_NORMS.items() if s.head_norms]
        for part, name, width in norms:
            yield f"{theirs}.{name}.weight", tensor(f"{ours}.{part}.weight", (width,))


def _llama_order(model: TextModel, part: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorder a llama model's query and key rows for llama.cpp, which rotates neighbouring rows instead of halves."""
    if model.backbone != "llama" or part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return rows
    halves = rows.reshape(-1, 2, model.shape.head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))

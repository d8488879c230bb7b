"""Read a GGUF file as the checkpoint of a language model (llama, qwen2 or qwen3), dequantised slice by slice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, Unread
from edgevlm.packages import install
from edgevlm.runtime.files import look

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUTSIDE_LAYERS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}


class GgufCheckpoint(Checkpoint):
    """A checkpoint whose settings and tensors are read from a GGUF file. ``folder`` is the file's path.

    Raises UserError if the file is missing or damaged, its architecture is not in ARCHITECTURES, or gguf is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.folder, self._reads = path, True
        if look(path) != "file":
            raise UserError(f"{path}: is not a file; give a GGUF file")
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError:
            raise UserError(f"{path}: reading GGUF needs the package gguf: {install('gguf')}") from None

        class Reader(GGUFReader):
            """A GGUF reader that never reads past the file's end. GGUFReader itself trusts the array lengths in the file."""

            def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> NDArray[Any]:
                if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                    raise ValueError("truncated field")
                found: NDArray[Any] = super()._get(offset, dtype, count, *order, **named)
                return found

        try:
            self._gguf = Reader(path)
        except Exception as error:  # on a damaged file, numpy and gguf raise exceptions of several types
            raise UserError(f"{path}: is not a GGUF file, or is damaged or truncated ({error}); download it again") from None
        arch = self.field("general.architecture")
        if arch not in ARCHITECTURES:
            raise UserError(f"{path}: architecture {arch!r} is not supported, only {', '.join(ARCHITECTURES)}")
        text = {key: self.field(f"{arch}.{name}") for name, key in _SETTINGS.items()} | {"model_type": arch}
        if None in text.values():
            raise UserError(f"{path}: a model setting is missing; download it again")
        heads = {"self_attn.q_proj.": text["num_attention_heads"], "self_attn.k_proj.": text["num_key_value_heads"]}
        self.tensors = {}
        for tensor in self._gguf.tensors:
            if (name := _canonical(tensor.name)) is not None:
                paired = next((count for part, count in heads.items() if part in name), None) if arch == "llama" else None
                self.tensors[name] = self._unread(tensor, paired)
        if "text.embed_tokens.weight" not in self.tensors:
            raise UserError(f"{path}: token embedding is missing; download it again")
        self.config = {"text_config": text | {"vocab_size": self.tensors["text.embed_tokens.weight"].shape[0]}}
        self.tied = "text.lm_head.weight" not in self.tensors

    def field(self, name: str) -> Any:
        field = self._gguf.get_field(name)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError:
            raise UserError(f"{self.folder}: {name} is not text; download it again") from None

    def _unread(self, tensor: Any, heads: int | None) -> Unread:
        """Describe a tensor without reading it.

        llama.cpp stores the two rows of a rotary pair next to each other. With ``heads``, rows are reordered so that the two
        rows of a pair are half a head apart.
        """
        from gguf.quants import dequantize

        shape, data = tuple(int(size) for size in reversed(tensor.shape)), tensor.data
        if heads is not None and (not shape or heads < 1 or shape[0] % (2 * heads)):
            raise UserError(
                f"{self.folder}: rows of tensor {tensor.name!r} cannot be split into {heads} heads; download it again"
            )
        order = None if heads is None else np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

        def read(rows: slice) -> NDArray[Any]:
            chosen = data[rows] if order is None else data[order[rows]]
            return np.asarray(dequantize(chosen, tensor.tensor_type), np.float32)

        return Unread(self.folder, tensor.name, "F32", shape, read)


def _canonical(name: str) -> str | None:
    """Translate a name such as ``blk.3.attn_q.weight`` to ``text.layers.3.self_attn.q_proj.weight``, or return None."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        part = _IN_LAYER.get(match[2])
        return part and f"text.layers.{match[1]}.{part}.{match[3]}"
    part, _, what = name.rpartition(".")
    return f"text.{_OUTSIDE_LAYERS[part]}.{what}" if part in _OUTSIDE_LAYERS else None

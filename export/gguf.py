"""The text half of a checkpoint from a GGUF file: llama, qwen2 and qwen3, dequantised a slice of one tensor at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, Unread, with_defaults
from edgevlm.packages import install
from edgevlm.runtime.files import look

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_AGAIN = "give the GGUF file of this checkpoint's text half"
_OUTSIDE_LAYERS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_SETTINGS = {  # of the file -> of text_config
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """See :class:`edgevlm.export.checkpoint.Unread`. ``order``: the file's row of each row, if they are in another order."""

    path: Path
    name: str
    tensor: Any
    order: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.tensor.shape))

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """See :class:`edgevlm.export.checkpoint.Unread`."""
        from gguf.quants import dequantize

        data = self.tensor.data
        chosen = data[start:stop] if self.order is None else data[self.order[start:stop]]
        array: NDArray[np.float32] = np.asarray(dequantize(chosen, self.tensor.tensor_type), np.float32)
        return array


def text_tensors(path: Path, text_config: dict[str, Any]) -> dict[str, Unread]:
    """Canonical name -> tensor of the GGUF file ``path``, for a checkpoint of this ``text_config``.

    Raises UserError if the file is missing or damaged, if it is of another model, or if the package gguf is not installed.
    """
    reader = _open(path)
    arch, config = _architecture(path, reader), with_defaults(text_config)
    _check(path, reader, arch, config)
    return _tensors(path, reader, arch, config)


class GgufCheckpoint(Checkpoint):
    """A GGUF file as a checkpoint of a language model alone, by the settings that the file holds itself.

    ``folder`` is the file. Raises UserError if it is missing, damaged or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        self.folder, self._gguf = path, _open(path)
        arch = _architecture(path, self._gguf)
        text = {key: self.field(f"{arch}.{name}") for name, key in _SETTINGS.items()}
        text |= {"model_type": arch, "max_position_embeddings": self.field(f"{arch}.context_length")}
        lacking = [key for key, value in text.items() if value is None]
        if lacking:
            raise UserError(f"{path}: does not say what its {lacking[0]} is; download it again")
        self.tensors, self._reads = _tensors(path, self._gguf, arch, text), True
        if "text.embed_tokens.weight" not in self.tensors:
            raise UserError(f"{path}: has no embedding of tokens; download it again")
        self.config = {"text_config": text | {"vocab_size": self.tensors["text.embed_tokens.weight"].shape[0]}}
        self.tied = "text.lm_head.weight" not in self.tensors

    def field(self, name: str) -> Any:
        """What the file says of ``name``; None where it says nothing."""
        return _field(self._gguf, name)


def _architecture(path: Path, reader: Any) -> str:
    arch = _field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(f"{path}: architecture {arch!r} cannot be read; GGUF is read of {', '.join(ARCHITECTURES)}")
    return str(arch)


def _tensors(path: Path, reader: Any, arch: str, config: dict[str, Any]) -> dict[str, Unread]:
    """The file's tensors by canonical name."""
    tensors: dict[str, Unread] = {}
    for tensor in reader.tensors:
        if (name := _canonical(tensor.name)) is not None:
            heads = {".self_attn.q_proj.": "num_attention_heads", ".self_attn.k_proj.": "num_key_value_heads"}
            key = next((key for part, key in heads.items() if part in name), None) if arch == "llama" else None
            order = None if key is None else _order(path, tensor, int(config[key]))
            tensors[name] = GgufTensor(path, tensor.name, tensor, order)
    return tensors


def _open(path: Path) -> Any:
    if look(path) != "file":
        raise UserError(f"{path}: is no file; {_AGAIN}")
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise UserError(f"{path}: reading GGUF needs the package gguf: {install('gguf')}") from None

    class Reader(GGUFReader):
        """Stops where the file ends: the package goes on, for as many numbers as an array claims to have."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> NDArray[Any]:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends within a field")
            found: NDArray[Any] = super()._get(offset, dtype, count, *order, **named)
            return found

    try:
        return Reader(path)
    except Exception as error:  # numpy's and its own, for whatever is wrong with the file
        raise UserError(f"{path}: is no GGUF file, or is damaged or truncated ({error}); download it again") from None


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    try:
        return None if field is None else field.contents()
    except UnicodeDecodeError:
        raise UserError(f"the GGUF file's {name} is no text; download it again") from None


def _check(path: Path, reader: Any, arch: str, config: dict[str, Any]) -> None:
    """Refuse a file whose settings are not the checkpoint's: its numbers would be taken for another model's."""
    kind = str(config.get("model_type"))
    if kind != arch:
        raise UserError(f"{path}: is of architecture {arch} and config.json's text_config is {kind}; {_AGAIN}")
    rope = dict(config.get("rope_parameters") or {})
    for name, key in _SETTINGS.items():
        found, wanted = _field(reader, f"{arch}.{name}"), rope.get(key, config.get(key))
        if found is not None and wanted is not None and abs(found - wanted) > 1e-5 * abs(wanted):
            raise UserError(f"{path}: {arch}.{name} is {found:g} and config.json's {key} is {wanted:g}; {_AGAIN}")


def _canonical(name: str) -> str | None:
    """``blk.3.attn_q.weight`` is ``text.layers.3.self_attn.q_proj.weight``; None for what no decoder here has."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        part = _IN_LAYER.get(match[2])
        return part and f"text.layers.{match[1]}.{part}.{match[3]}"
    part, _, what = name.rpartition(".")
    return f"text.{_OUTSIDE_LAYERS[part]}.{what}" if part in _OUTSIDE_LAYERS else None


def _order(path: Path, tensor: Any, heads: int) -> NDArray[np.int64]:
    """llama.cpp keeps rotary pairs of Llama side by side: the file's row of each row, heads of two halves again."""
    rows = int(tensor.shape[-1]) if len(tensor.shape) else 1
    if rows % (2 * heads):
        raise UserError(f"{path}: tensor {tensor.name!r} has {rows} rows, which are not {heads} heads; {_AGAIN}")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

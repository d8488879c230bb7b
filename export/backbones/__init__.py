"""Text backbones, one file each and one line in the registry: what the decoder builder asks of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, nearest
from edgevlm.export.precisions import Stored

Float32 = NDArray[np.float32]
Matrix = TypeVar("Matrix", bound=Float32 | Stored, covariant=True)

# text_config.model_type -> module with ``shape`` and ``layer``
TEXT_BACKBONES: dict[str, str] = {
    "llama": "edgevlm.export.backbones.llama",
    "qwen2": "edgevlm.export.backbones.qwen2",
    "qwen2_5_vl_text": "edgevlm.export.backbones.qwen2",
    "qwen2_vl_text": "edgevlm.export.backbones.qwen2",
    "qwen3": "edgevlm.export.backbones.qwen3",
    "qwen3_vl_text": "edgevlm.export.backbones.qwen3",
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """All sizes of a decoder, checked against one another.

    sections: rotary pairs that turn by each of three position axes, None for 1-D positions; ``interleaved``: axes take turns.
    biases: the projections that have one, of ``q k v o gate up down``. deepstack: layers that image features are added after.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    model_limit: int
    tied: bool
    head_norms: bool = False
    biases: tuple[str, ...] = ()
    sections: tuple[int, ...] | None = None
    interleaved: bool = False
    deepstack: int = 0

    def __post_init__(self) -> None:
        small = [name for name in ("layers", "heads", "kv_heads", "hidden", "vocab") if getattr(self, name) < 1]
        if small:
            raise UserError(f"config.json: text_config says {small[0]} = {getattr(self, small[0])}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise UserError(f"config.json: {self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 8:
            raise UserError(f"config.json: head_dim {self.head_dim} is not a multiple of 8, which the attention kernels need")
        if self.sections is not None and (len(self.sections) != 3 or sum(self.sections) != self.head_dim // 2):
            wanted = f"three numbers that add up to {self.head_dim // 2}"
            raise UserError(f"config.json: mrope_section {list(self.sections)} must be {wanted}, half of head_dim")

    @property
    def kv_size(self) -> int:
        """Width of one layer's keys for one token."""
        return self.kv_heads * self.head_dim

    def inv_freq(self) -> list[float]:
        """The rotary frequencies exactly as transformers computes them, in float32: ``[head_dim / 2]``."""
        import torch

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float) / self.head_dim
        return [float(value) for value in (1.0 / (self.rope_theta**exponents))]


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Matrix]):
    """One layer: matrices ``[out, in]``, q, k, v stacked in one and gate, up in another.

    Matrices are numbers as the checkpoint has them, or stored as a precision, or the checkpoint itself, rounds them.
    """

    input_norm: Float32  # (hidden,)
    qkv: Matrix  # ((heads + 2 kv_heads) head_dim, hidden)
    qkv_bias: Float32 | None  # ((heads + 2 kv_heads) head_dim,)
    query_norm: Float32 | None  # (head_dim,)
    key_norm: Float32 | None  # (head_dim,)
    output: Matrix  # (hidden, heads head_dim)
    output_bias: Float32 | None  # (hidden,)
    mlp_norm: Float32  # (hidden,)
    gate_up: Matrix  # (2 intermediate, hidden)
    gate_up_bias: Float32 | None  # (2 intermediate,)
    down: Matrix  # (hidden, intermediate)
    down_bias: Float32 | None  # (hidden,)


class Backbone(Protocol):
    """A module of this folder."""

    def shape(self, config: dict[str, Any], tied: bool) -> DecoderShape:
        """The sizes in ``text_config``; raises UserError for what the graph cannot express."""
        ...

    def layer(self, checkpoint: Checkpoint, shape: DecoderShape, layer: int) -> LayerWeights[Float32 | Stored]:
        """Layer ``layer``'s weights."""
        ...


def text_backbone(model_type: str) -> Backbone:
    """The backbone for a ``text_config.model_type``; raises UserError naming the nearest known one."""
    if model_type not in TEXT_BACKBONES:
        raise UserError(f"config.json: text backbone {model_type!r} cannot be exported; {nearest(model_type, TEXT_BACKBONES)}")
    module: Any = import_module(TEXT_BACKBONES[model_type])
    backbone: Backbone = module
    return backbone


def rope_of(config: dict[str, Any]) -> tuple[float, tuple[int, ...] | None, bool]:
    """The rotary base, the sections of M-RoPE if there are, and whether those are interleaved.

    Raises UserError for any scaling, which would silently give other positions.
    """
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaled = [key for key in ("factor", "long_factor") if rope.get(key) is not None]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "mrope") or scaled or partial not in (None, 1.0):
        raise UserError(f"config.json: rotary scaling {rope} cannot be exported yet; only rope_type 'default' can")
    sections = rope.get("mrope_section")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    return theta, None if sections is None else tuple(map(int, sections)), bool(rope.get("mrope_interleaved", False))

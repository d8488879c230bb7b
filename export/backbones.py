"""Text backbones: Llama and its heirs, RMS norms, rotate-half RoPE, SwiGLU; what the decoder builder asks of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError, nearest
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import Stored
from edgevlm.export.prequantised import joined, prequantised, read_packed

Float32 = NDArray[np.float32]
STACKED = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # matrices of a layer


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
        """The rotary frequencies in float32, as transformers has them: ``[head_dim / 2]``."""
        return [float(value) for value in inverse_frequencies(self.rope_theta, self.head_dim)]


def inverse_frequencies(theta: float, dim: int) -> Float32:
    """``theta ** (-2 i / dim)`` as PyTorch rounds it, on any processor: ``[dim / 2]``.

    numpy's float32 power differs in the last bit from one instruction set to the next; float64's, rounded, does not.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return 1 / (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: ``qkv``, ``output``, ``gate_up`` and ``down`` ``[out, in]``, q, k, v stacked in one and gate, up in another.

    Matrices are float32 as the checkpoint has them, or stored as a precision, or the checkpoint itself, rounds them. biases:
    ``[out]``, of matrices that have one. norms: ``input``, ``mlp`` ``[hidden]`` and, of heads, ``q``, ``k`` ``[head_dim]``.
    """

    matrices: Mapping[str, Float32 | Stored]
    biases: Mapping[str, Float32]
    norms: Mapping[str, Float32]


@dataclass(frozen=True, slots=True)
class Backbone:
    """What sets a text backbone apart. biases: of ``q k v o gate up down`` whatever the configuration says, None if it says.

    gated_biases: whether it may say so of the MLP too. head_norms: queries and keys are normed head by head before they are
    rotated. head_dim: where the configuration leaves it out.
    """

    biases: tuple[str, ...] | None = None
    gated_biases: bool = False
    head_norms: bool = False
    head_dim: int | None = None

    def shape(self, config: dict[str, Any], tied: bool) -> DecoderShape:
        """The sizes in ``text_config``; raises UserError for what the graph cannot express."""
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json: hidden_act {config['hidden_act']!r} cannot be exported; decoders here use 'silu'")
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        if config.get("use_sliding_window") or kinds:
            raise UserError("config.json: sliding-window attention layers cannot be exported; set use_sliding_window to false")
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        if min(heads, hidden) < 1:
            raise UserError(f"config.json: a decoder of {heads} heads and {hidden} columns cannot be exported")
        theta, sections, interleaved = rope_of(config)
        biases = self.biases
        if biases is None:
            biases = ("q", "k", "v", "o") if config.get("attention_bias") else ()
            biases += ("gate", "up", "down") if self.gated_biases and config.get("mlp_bias") else ()
        return DecoderShape(
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim", self.head_dim) or hidden // max(heads, 1)),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            model_limit=int(config["max_position_embeddings"]),
            tied=tied,
            head_norms=self.head_norms,
            biases=biases,
            sections=sections,
            interleaved=interleaved,
        )

    def layer(self, checkpoint: Checkpoint, s: DecoderShape, layer: int) -> LayerWeights:
        """Layer ``layer``'s weights."""
        own = s.biases if self.biases is None else self.biases
        place, packing = f"text.layers.{layer}", prequantised(checkpoint.config)
        sizes = {"q": (s.heads * s.head_dim, s.hidden), "k": (s.kv_size, s.hidden), "v": (s.kv_size, s.hidden)}
        sizes |= {"o": (s.hidden, s.heads * s.head_dim)}
        sizes |= {"gate": (s.intermediate, s.hidden), "up": (s.intermediate, s.hidden), "down": (s.hidden, s.intermediate)}
        matrices, biases = dict[str, Float32 | Stored](), dict[str, Float32]()
        for name, parts in STACKED.items():
            places = [f"{place}.{'self_attn' if part in 'qkvo' else 'mlp'}.{part}_proj" for part in parts]
            pairs = list(zip(places, (sizes[part] for part in parts), strict=True))
            if packing is not None and f"{places[0]}.qweight" in checkpoint.tensors:
                matrices[name] = joined([read_packed(checkpoint, packing, each, size) for each, size in pairs])
            else:
                weight, filled = np.empty((sum(size[0] for _, size in pairs), pairs[0][1][1]), np.float32), 0
                for each, size in pairs:
                    weight[filled : filled + size[0]] = checkpoint.tensor(f"{each}.weight", size)
                    filled += size[0]
                matrices[name] = weight
            if parts[0] in own:
                biases[name] = np.concatenate([checkpoint.tensor(f"{each}.bias", size[:1]) for each, size in pairs])
        norms = {"input": checkpoint.tensor(f"{place}.input_layernorm.weight", (s.hidden,))}
        norms["mlp"] = checkpoint.tensor(f"{place}.post_attention_layernorm.weight", (s.hidden,))
        for part in "qk" if s.head_norms else "":
            norms[part] = checkpoint.tensor(f"{place}.self_attn.{part}_norm.weight", (s.head_dim,))
        return LayerWeights(matrices, biases, norms)


_LLAMA = Backbone(gated_biases=True)
_QWEN2 = Backbone(biases=("q", "k", "v"))
_QWEN3 = Backbone(head_norms=True, head_dim=128)
TEXT_BACKBONES: dict[str, Backbone] = {  # by text_config.model_type
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
}


def text_backbone(model_type: str) -> Backbone:
    """The backbone for a ``text_config.model_type``; raises UserError naming the nearest known one."""
    if model_type not in TEXT_BACKBONES:
        raise UserError(f"config.json: text backbone {model_type!r} cannot be exported; {nearest(model_type, TEXT_BACKBONES)}")
    return TEXT_BACKBONES[model_type]


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

"""Read language models that are built like Llama, with RMS norms, rotate-half RoPE and SwiGLU, from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import Stored
from edgevlm.export.precisions.layouts import Dense
from edgevlm.export.prequantised import check_packed, dequantised, is_packed, joined, prequantised, read_packed
from edgevlm.runtime.plugins import load_class, names

Float32 = NDArray[np.float32]
STACKED = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # a layer's matrices


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and options of a decoder, checked for consistency.

    ``sections``: how many rotary pairs belong to each of M-RoPE's three position axes. ``interleaved``: whether the rotary
    pairs of the three axes alternate. ``biases``: which of the projections ``q k v o gate up down`` have a bias. ``deepstack``:
    how many layers get DeepStack features; they are the first layers. ``gate``: ``silu`` or ``gelu_pytorch_tanh``.
    ``windows``: each layer's attention window in positions (0: none), or empty if no layer has a window. ``local_theta``: the
    rotary base of layers with a window, if it differs from ``rope_theta``. ``whole_frames``: whether all rows of a frame attend
    to each other.
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
    gate: str = "silu"
    windows: tuple[int, ...] = ()
    local_theta: float | None = None
    whole_frames: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(f"config.json: {self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 8:
            raise UserError(f"config.json: head_dim {self.head_dim} must be a multiple of 8 for the attention kernels")
        if self.sections is not None and (len(self.sections) != 3 or sum(self.sections) != self.head_dim // 2):
            wanted = f"three numbers that add up to {self.head_dim // 2}"
            raise UserError(f"config.json: mrope_section {list(self.sections)} must be {wanted}, half of head_dim")

    @property
    def kv_size(self) -> int:
        """Return the number of values in one token's keys, for one layer."""
        return self.kv_heads * self.head_dim

    def turns_apart(self, layer: int) -> bool:
        """Return whether a layer uses ``local_theta`` as its rotary base."""
        return self.local_theta is not None and bool(self.windows[layer])

    def inv_freq(self) -> list[float]:
        """Return the rotary frequencies that transformers computes, float32 ``[head_dim / 2]``."""
        return [float(value) for value in inverse_frequencies(self.rope_theta, self.head_dim)]


def inverse_frequencies(theta: float, dim: int) -> Float32:
    """Return ``theta ** (-2 i / dim)`` for each rotary pair, rounded as in PyTorch, and identical on all processors."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return 1 / (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer.

    ``matrices``: ``qkv`` (q, k and v stacked), ``output``, ``gate_up`` (gate and up stacked) and ``down``, each ``[out, in]``,
    in float32 or rounded. ``norms``: the gains of the norms before attention (``input``) and before the MLP (``mlp``), each
    ``[hidden]``. Some models also have norms after attention and MLP (``attended`` and ``passed``, each ``[hidden]``), and
    for each head's queries and keys (``q`` and ``k``, each ``[head_dim]``).
    """

    matrices: Mapping[str, Float32 | Stored]
    biases: Mapping[str, Float32]
    norms: Mapping[str, Float32]


@dataclass(frozen=True, slots=True)
class Backbone:
    """A kind of language model, and how to read its weights from a checkpoint.

    ``biases``: which of ``q k v o gate up down`` have a bias. If None, the config decides: ``attention_bias`` gives ``q k v o``
    biases and, with ``gated_biases``, ``mlp_bias`` gives ``gate up down`` biases. ``head_norms``: whether each head's queries
    and keys are normed before rotation. ``head_dim`` and ``sections``: the head size and M-RoPE's sections, for configs without
    these settings. ``interleaved``: whether the rotary pairs of M-RoPE's axes alternate.
    """

    biases: tuple[str, ...] | None = None
    gated_biases: bool = False
    head_norms: bool = False
    head_dim: int | None = None
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False

    def shape(self, config: dict[str, Any], tied: bool) -> DecoderShape:
        """Return the sizes of the decoder that ``text_config`` describes. Raises UserError for unsupported settings."""
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
        if slides(config):
            raise UserError("config.json: sliding-window attention layers (use_sliding_window, layer_types) are not supported")
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        if min(heads, hidden) < 1:
            raise UserError(f"config.json: num_attention_heads {heads} and hidden_size {hidden} must be at least 1")
        theta, sections = rope_of(config)
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
            sections=(sections or self.sections) if self.sections else None,
            interleaved=self.interleaved,
        )

    def matrices(self, s: DecoderShape, layer: int) -> dict[str, tuple[str, tuple[int, int]]]:
        """Return the tensor name and the shape (out, in) of each matrix in a layer, keyed by projection, such as ``q``."""
        sizes = {"q": (s.heads * s.head_dim, s.hidden), "k": (s.kv_size, s.hidden), "v": (s.kv_size, s.hidden)}
        sizes |= {"o": (s.hidden, s.heads * s.head_dim)}
        sizes |= {"gate": (s.intermediate, s.hidden), "up": (s.intermediate, s.hidden), "down": (s.hidden, s.intermediate)}
        block = {part: "self_attn" if part in "qkvo" else "mlp" for part in sizes}
        return {part: (f"text.layers.{layer}.{block[part]}.{part}_proj", size) for part, size in sizes.items()}

    def vectors(self, s: DecoderShape, layer: int) -> dict[str, tuple[str, int]]:
        """Return the tensor name and the size of each norm and bias in a layer, keyed by a short name such as ``q.bias``."""
        place, matrices = f"text.layers.{layer}", self.matrices(s, layer)
        found = {"input": (f"{place}.input_layernorm.weight", s.hidden)}
        found["mlp"] = (f"{place}.post_attention_layernorm.weight", s.hidden)
        found |= {part: (f"{place}.self_attn.{part}_norm.weight", s.head_dim) for part in ("qk" if s.head_norms else "")}
        own = s.biases if self.biases is None else self.biases
        return found | {f"{part}.bias": (f"{matrices[part][0]}.bias", matrices[part][1][0]) for part in own}

    def embedding(self, checkpoint: Checkpoint, s: DecoderShape) -> Iterator[Float32]:
        """Yield the embedding ``[vocab, hidden]`` in slices of rows."""
        return checkpoint.rows("text.embed_tokens.weight", (s.vocab, s.hidden))

    def final_norm(self, checkpoint: Checkpoint, s: DecoderShape) -> Float32:
        """Return the gain ``[hidden]`` of the norm before the head."""
        return checkpoint.tensor("text.norm.weight", (s.hidden,))

    def check(self, checkpoint: Checkpoint, s: DecoderShape) -> None:
        """Raise UserError for the first tensor that is missing or contradicts the configuration; no tensor is read.

        Adds a note to the checkpoint about matrices that AWQ or GPTQ left in float.
        """
        names = ("text.embed_tokens.weight",) if s.tied else ("text.embed_tokens.weight", "text.lm_head.weight")
        for name in names:
            checkpoint.check(name, (s.vocab, s.hidden))
        checkpoint.check("text.norm.weight", (s.hidden,))
        packing, left = prequantised(checkpoint.config), list[str]()
        for layer in range(s.layers):
            for name, length in self.vectors(s, layer).values():
                checkpoint.check(name, (length,))
            for place, size in self.matrices(s, layer).values():
                if packing is not None and is_packed(checkpoint, place):
                    check_packed(checkpoint, packing, place, size)
                else:
                    left.append(checkpoint.check(f"{place}.weight", size).name)
        if left and packing is not None:
            what = f"{packing.method} has left {len(left)} matrices of the decoder in float ({left[0]}, ..)"
            checkpoint.notes.append(f"{checkpoint.folder / 'config.json'}: {what}: stored as float32")

    def left_in_float(self, checkpoint: Checkpoint, s: DecoderShape) -> int:
        """Count the parameters of the decoder's matrices that AWQ or GPTQ did not round."""
        count = 0
        for every in (self.matrices(s, layer) for layer in range(s.layers)):
            for stacked in ([every[part] for part in parts] for parts in STACKED.values()):
                if not all(is_packed(checkpoint, place) for place, _ in stacked):
                    count += sum(out * width for _, (out, width) in stacked)
        return count

    def layer(self, checkpoint: Checkpoint, s: DecoderShape, layer: int) -> LayerWeights:
        packing, every, vectors = prequantised(checkpoint.config), self.matrices(s, layer), self.vectors(s, layer)
        matrices, biases = dict[str, Float32 | Stored](), dict[str, Float32]()
        for name, parts in STACKED.items():
            pairs = [every[part] for part in parts]
            if packing is not None and all(is_packed(checkpoint, place) for place, _ in pairs):
                matrices[name] = joined([read_packed(checkpoint, packing, place, size) for place, size in pairs])
            else:
                weight, filled = np.empty((sum(size[0] for _, size in pairs), pairs[0][1][1]), np.float32), 0
                for place, size in pairs:
                    if packing is not None and is_packed(checkpoint, place):
                        rows = dequantised(checkpoint, packing, place, size)
                    else:
                        rows = checkpoint.tensor(f"{place}.weight", size)
                    weight[filled : filled + size[0]] = rows
                    filled += size[0]
                matrices[name] = weight if packing is None else Stored.of(Dense(), weight)
            named = [vectors[f"{part}.bias"] for part in parts if f"{part}.bias" in vectors]
            if named:
                biases[name] = np.concatenate([checkpoint.tensor(each, (length,)) for each, length in named])
        norms = {part: checkpoint.tensor(name, (size,)) for part, (name, size) in vectors.items() if not part.endswith(".bias")}
        return LayerWeights(matrices, biases, norms)


_LLAMA = Backbone(gated_biases=True)
_QWEN2 = Backbone(biases=("q", "k", "v"))
_QWEN3 = Backbone(head_norms=True, head_dim=128)
_QWEN2_VL = replace(_QWEN2, sections=(16, 24, 24))
TEXT_BACKBONES: dict[str, Backbone] = {  # keyed by text_config.model_type
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(_QWEN3, sections=(24, 20, 20), interleaved=True),
}


def text_backbone(model_type: str) -> Backbone:
    """Return the backbone, possibly a plugin's, for ``text_config.model_type``. Raises UserError for an unknown type."""
    if model_type in TEXT_BACKBONES:
        return TEXT_BACKBONES[model_type]
    if model_type not in (others := names("backbones")):
        known = ", ".join([*TEXT_BACKBONES, *others])
        raise UserError(f"config.json: text backbone {model_type!r} is not supported, only {known}")
    backbone: Backbone = load_class("backbones", model_type)
    return backbone


def slides(config: Mapping[str, Any]) -> bool:
    """Return whether any layer of the model uses a sliding window."""
    if kinds := config.get("layer_types"):
        return any(kind != "full_attention" for kind in kinds)
    layers = int(config["num_hidden_layers"])
    has_window = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return bool(has_window and int(config.get("max_window_layers", layers)) < layers)


def rope_of(config: dict[str, Any]) -> tuple[float, tuple[int, ...] | None]:
    """Return the config's rotary base, and its M-RoPE sections or None.

    Raises UserError for any rotary scaling: ignoring it would silently give wrong positions.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaled = [key for key in ("factor", "long_factor") if rope.get(key) is not None]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "mrope") or scaled or partial not in (None, 1.0):
        raise UserError(f"config.json: rotary scaling {rope} is not supported, only rope_type 'default'")
    sections = rope.get("mrope_section")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    return theta, None if sections is None else tuple(map(int, sections))

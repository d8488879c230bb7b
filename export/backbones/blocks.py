"""The decoder layer that Llama and its heirs share: RMS norms, rotate-half RoPE, SwiGLU. Backbones say what they add to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape, Float32, LayerWeights, rope_of
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import Stored
from edgevlm.export.prequantised import joined, prequantised, read_packed


def plain_shape(config: dict[str, Any], tied: bool, **extra: Any) -> DecoderShape:
    """The sizes in ``text_config``; raises UserError for what the graph cannot express."""
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act {config['hidden_act']!r} cannot be exported; decoders here use 'silu'")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        raise UserError("config.json: sliding-window attention layers cannot be exported; set use_sliding_window to false")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    theta, sections, interleaved = rope_of(config)
    return DecoderShape(
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        model_limit=int(config["max_position_embeddings"]),
        tied=tied,
        sections=sections,
        interleaved=interleaved,
        **extra,
    )


def plain_layer(checkpoint: Checkpoint, s: DecoderShape, layer: int, biases: tuple[str, ...]) -> LayerWeights[Float32 | Stored]:
    """Layer ``layer``'s weights; ``biases`` are the parts that have one, of ``q k v o gate up down``."""
    attention, mlp = f"text.layers.{layer}.self_attn", f"text.layers.{layer}.mlp"
    sizes = {"q": (s.heads * s.head_dim, s.hidden), "k": (s.kv_size, s.hidden), "v": (s.kv_size, s.hidden)}
    sizes |= {"o": (s.hidden, s.heads * s.head_dim)}
    sizes |= {"gate": (s.intermediate, s.hidden), "up": (s.intermediate, s.hidden), "down": (s.hidden, s.intermediate)}

    packing = prequantised(checkpoint.config)

    def stacked(*parts: str) -> tuple[Float32 | Stored, Float32 | None]:
        places = [f"{attention if part in 'qkvo' else mlp}.{part}_proj" for part in parts]
        pairs = list(zip(places, (sizes[part] for part in parts), strict=True))
        weight: Float32 | Stored
        if packing is not None and f"{places[0]}.qweight" in checkpoint.names:
            weight = joined([read_packed(checkpoint, packing, place, size) for place, size in pairs])
        else:
            weight = np.concatenate([checkpoint.tensor(f"{place}.weight", size) for place, size in pairs])
        if parts[0] not in biases:
            return weight, None
        return weight, np.concatenate([checkpoint.tensor(f"{place}.bias", size[:1]) for place, size in pairs])

    (qkv, qkv_bias), (output, output_bias) = stacked("q", "k", "v"), stacked("o")
    (gate_up, gate_up_bias), (down, down_bias) = stacked("gate", "up"), stacked("down")
    return LayerWeights(
        input_norm=checkpoint.tensor(f"text.layers.{layer}.input_layernorm.weight", (s.hidden,)),
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=checkpoint.tensor(f"{attention}.q_norm.weight", (s.head_dim,)) if s.head_norms else None,
        key_norm=checkpoint.tensor(f"{attention}.k_norm.weight", (s.head_dim,)) if s.head_norms else None,
        output=output,
        output_bias=output_bias,
        mlp_norm=checkpoint.tensor(f"text.layers.{layer}.post_attention_layernorm.weight", (s.hidden,)),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )

"""Qwen2: biases on q, k and v only, SwiGLU, RMS norms, rotate-half RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape, LayerWeights, default_rope_theta
from edgevlm.export.checkpoint import Checkpoint


def shape(config: dict[str, Any], tied: bool) -> DecoderShape:
    """See :class:`edgevlm.export.backbones.Backbone`."""
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act {config['hidden_act']!r} cannot be exported; qwen2 decoders use 'silu'")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        raise UserError("config.json: sliding-window attention layers cannot be exported; set use_sliding_window to false")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return DecoderShape(
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=default_rope_theta(config),
        model_limit=int(config["max_position_embeddings"]),
        tied=tied,
    )


def layer(checkpoint: Checkpoint, shape: DecoderShape, layer: int) -> LayerWeights:
    """See :class:`edgevlm.export.backbones.Backbone`."""
    s, name = shape, f"text.layers.{layer}"
    rows = {"q": s.heads * s.head_dim, "k": s.kv_size, "v": s.kv_size}
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return LayerWeights(
        input_norm=checkpoint.tensor(f"{name}.input_layernorm.weight", (s.hidden,)),
        qkv=np.concatenate([checkpoint.tensor(f"{attention}.{p}_proj.weight", (n, s.hidden)) for p, n in rows.items()]),
        qkv_bias=np.concatenate([checkpoint.tensor(f"{attention}.{p}_proj.bias", (n,)) for p, n in rows.items()]),
        output=checkpoint.tensor(f"{attention}.o_proj.weight", (s.hidden, s.heads * s.head_dim)),
        mlp_norm=checkpoint.tensor(f"{name}.post_attention_layernorm.weight", (s.hidden,)),
        gate_up=np.concatenate(
            [checkpoint.tensor(f"{mlp}.{part}_proj.weight", (s.intermediate, s.hidden)) for part in ("gate", "up")]
        ),
        down=checkpoint.tensor(f"{mlp}.down_proj.weight", (s.hidden, s.intermediate)),
    )

"""Qwen3, and the text half of Qwen3-VL: queries and keys are normed head by head before they are rotated."""

from __future__ import annotations

from typing import Any

from edgevlm.export.backbones import DecoderShape, Float32, LayerWeights
from edgevlm.export.backbones.blocks import plain_layer, plain_shape
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import Stored


def shape(config: dict[str, Any], tied: bool) -> DecoderShape:
    """See :class:`edgevlm.export.backbones.Backbone`."""
    biases = ("q", "k", "v", "o") if config.get("attention_bias") else ()
    return plain_shape({"head_dim": 128, **config}, tied, head_norms=True, biases=biases)


def layer(checkpoint: Checkpoint, shape: DecoderShape, layer: int) -> LayerWeights[Float32 | Stored]:
    """See :class:`edgevlm.export.backbones.Backbone`."""
    return plain_layer(checkpoint, shape, layer, shape.biases)

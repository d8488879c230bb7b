"""Qwen2, and the text half of Qwen2-VL and Qwen2.5-VL: biases on q, k and v only."""

from __future__ import annotations

from typing import Any

from edgevlm.export.backbones import DecoderShape, Float32, LayerWeights
from edgevlm.export.backbones.blocks import plain_layer, plain_shape
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import Stored


def shape(config: dict[str, Any], tied: bool) -> DecoderShape:
    """See :class:`edgevlm.export.backbones.Backbone`."""
    return plain_shape(config, tied)


def layer(checkpoint: Checkpoint, shape: DecoderShape, layer: int) -> LayerWeights[Float32 | Stored]:
    """See :class:`edgevlm.export.backbones.Backbone`."""
    return plain_layer(checkpoint, shape, layer, ("q", "k", "v"))

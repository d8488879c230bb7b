"""Settings of a checkpoint, of config.json and of the files beside it: what those that are read must be.

A model is refused for them before its sizes are multiplied or memory is asked for. What is not named here is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le, MaxLen

from edgevlm.errors import UserError, first_problem
from edgevlm.runtime.bundle import Count, Finite, Positions, Positive, TokenId, Width, Word

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter

Index = Annotated[int, Ge(-1024), Le(1024)]
Theta = Annotated[float, Ge(1), Le(1e12)]
Patches = Annotated[int, Ge(1), Le(1 << 20)]
Square = Annotated[int, Ge(1), Le(1 << 14)] | list[int]  # families refuse lists
Area = Annotated[int, Ge(1), Le(1 << 28)]  # pixels
Short = Annotated[list[Index], MaxLen(1024)]


@dataclass(frozen=True)
class Rope:
    """Rotary settings; ``rope_scaling`` of older checkpoints."""

    type: Word | None = None
    rope_type: Word | None = None
    rope_theta: Theta | None = None
    mrope_section: Short | None = None
    mrope_interleaved: bool | None = None


@dataclass(frozen=True)
class Quantization:
    """``quantization_config``."""

    quant_method: Word | None = None
    bits: Index | None = None
    w_bit: Index | None = None
    group_size: Index | None = None
    version: Word | Index | None = None
    format: Word | None = None
    checkpoint_format: Word | None = None


@dataclass(frozen=True)
class Sides:
    """Of a frame, in pixels; Qwen's edges are areas."""

    height: Area | None = None
    width: Area | None = None
    shortest_edge: Area | None = None
    longest_edge: Area | None = None


@dataclass(frozen=True)
class Sampling:
    """``video_sampling`` of SmolVLM's processor."""

    video_size: Sides | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """``config.json``, a section of it, or a processor file."""

    model_type: Word | None = None
    hidden_act: Word | None = None
    projector_hidden_act: Word | None = None
    vision_feature_select_strategy: Word | None = None
    spatial_pool_mode: Word | None = None
    text_config: CheckpointConfig | None = None
    vision_config: CheckpointConfig | None = None
    quantization_config: Quantization | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: Theta | None = None
    rms_norm_eps: Finite | None = None
    layer_norm_eps: Finite | None = None
    tie_word_embeddings: bool | None = None
    layer_types: Annotated[list[Word], MaxLen(1024)] | None = None
    hidden_size: Width | None = None
    intermediate_size: Annotated[int, Ge(1), Le(1 << 20)] | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Annotated[int, Ge(1), Le(1 << 24)] | None = None
    max_position_embeddings: Positions | None = None
    edgevlm_trained_length: Positions | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    image_token_id: TokenId | None = None
    image_token_index: TokenId | None = None
    video_token_id: TokenId | None = None
    video_token_index: TokenId | None = None
    vision_feature_layer: Index | Short | None = None
    spatial_pool_stride: Count | None = None
    scale_factor: Count | None = None
    image_size: Square | None = None
    patch_size: Square | None = None
    depth: Count | None = None
    num_heads: Count | None = None
    embed_dim: Width | None = None
    out_hidden_size: Width | None = None
    mlp_ratio: Annotated[float, Ge(0.01), Le(100)] | None = None
    spatial_merge_size: Square | None = None
    temporal_patch_size: Square | None = None
    window_size: Area | None = None
    tokens_per_second: Annotated[float, Ge(0), Le(1000)] | None = None
    num_position_embeddings: Patches | None = None
    deepstack_visual_indexes: Short | None = None
    fullatt_block_indexes: Short | None = None
    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    do_center_crop: bool | None = None
    do_pad: bool | None = None
    rescale_factor: Positive | None = None
    size: Area | Sides | None = None
    crop_size: Area | Sides | None = None
    min_pixels: Area | None = None
    max_pixels: Area | None = None
    video_sampling: Sampling | None = None
    max_image_size: Sides | None = None


@cache
def _schema() -> TypeAdapter[CheckpointConfig]:
    from pydantic import TypeAdapter  # a fifth of a second, for commands that load nothing

    return TypeAdapter(CheckpointConfig)


def check_settings(where: Path | str, settings: dict[str, Any]) -> None:
    """Raise UserError, which names the file ``where`` and the first setting of another type, or out of all range."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    try:
        _schema().validate_json(to_json(settings), strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: cannot be understood ({first_problem(error)}); save the checkpoint again") from None

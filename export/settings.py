"""Check the settings in a checkpoint's config.json and processor files before any memory is allocated for them.

The exporter reads only the settings that this module lists.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen, MultipleOf

from edgevlm.errors import UserError, first_problem
from edgevlm.runtime.bundle import Count, Finite, Penalty, Positions, Positive, TokenId, Width, Word

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

Index = Annotated[int, Ge(-1024), Le(1024)]
Theta = Annotated[float, Ge(1), Le(1e12)]
Numbers = Annotated[int, Ge(1), Le(1 << 20)]
Square = Annotated[int, Ge(1), Le(1 << 14)] | list[int]  # this check accepts a list, but every family refuses it

# a number of pixels, which some files write as a float such as 78400.0
Area = Annotated[int, Ge(1), Le(1 << 28)] | Annotated[float, MultipleOf(1), Ge(1), Le(1 << 28)]
Short = Annotated[list[Index], MaxLen(1024)]
_ROPE = {Word: "type rope_type", Theta: "rope_theta", Short: "mrope_section", bool: "mrope_interleaved"}
_QUANTIZATION = {
    Word: "quant_method format checkpoint_format",
    Word | Index: "version",
    Index: "bits w_bit group_size",
}
_SIDES = {Area: "height width shortest_edge longest_edge"}  # a frame's sides in pixels; in Qwen's files, the edges hold areas
_CONFIG = {
    Word: "model_type hidden_act projector_hidden_act vision_feature_select_strategy spatial_pool_mode",
    bool: "tie_word_embeddings use_sliding_window do_resize do_rescale do_normalize do_center_crop do_pad",
    Finite: "rms_norm_eps layer_norm_eps",
    Positive: "rescale_factor",
    Theta: "rope_theta",
    Annotated[float, Ge(0.01), Le(100)]: "mlp_ratio",
    Annotated[float, Ge(0), Le(1000)]: "tokens_per_second",
    Width: "hidden_size embed_dim out_hidden_size",
    Annotated[int, Ge(0)]: "sliding_window max_window_layers",
    Count: "num_hidden_layers num_attention_heads num_key_value_heads head_dim depth num_heads spatial_pool_stride "
    "scale_factor",
    Numbers: "intermediate_size num_position_embeddings",
    Annotated[int, Ge(1), Le(1 << 24)]: "vocab_size",
    Positions: "max_position_embeddings edgevlm_trained_length",
    TokenId: "image_token_id image_token_index video_token_id video_token_index",
    TokenId | list[TokenId]: "eos_token_id",
    Penalty: "repetition_penalty",
    Annotated[int, Ge(0), Le(1024)]: "no_repeat_ngram_size",
    Square: "image_size patch_size spatial_merge_size temporal_patch_size",
    Area: "window_size min_pixels max_pixels",
    Index | Short: "vision_feature_layer",
    Short: "deepstack_visual_indexes fullatt_block_indexes",
    Annotated[list[Word], MaxLen(1024)]: "layer_types",
    Annotated[list[Finite], MinLen(3), MaxLen(3)] | Finite: "image_mean image_std",
    Annotated[int, Ge(0), Le(5)]: "resample",
}


@cache
def _schema() -> type[BaseModel]:
    from pydantic import ConfigDict, create_model  # importing pydantic takes 0.2 s

    def model(table: dict[Any, str]) -> Any:
        fields: dict[str, Any] = {name: (kind | None, None) for kind, names in table.items() for name in names.split()}
        return create_model("Settings", __config__=ConfigDict(protected_namespaces=()), **fields)

    rope, quantization, sides = model(_ROPE), model(_QUANTIZATION), model(_SIDES)
    section = _CONFIG | {
        rope: "rope_parameters rope_scaling",
        quantization: "quantization_config",
        Area | sides | Annotated[list[Area], MinLen(2), MaxLen(2)]: "size crop_size",
        sides: "max_image_size",
        model({sides: "video_size"}): "video_sampling",
    }
    whole: type[BaseModel] = model(section | {model(section): "text_config vision_config"})
    return whole


def check_settings(where: Path | str, settings: dict[str, Any]) -> None:
    """Raise UserError for the first setting with a wrong type or value. The error names the setting and the file, ``where``."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    try:
        _schema().model_validate_json(to_json(settings), strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: invalid setting ({first_problem(error)}); correct or remove it") from None

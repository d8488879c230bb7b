"""The table of transformers' config defaults; ``python tests/export/test_config_defaults.py`` writes it anew."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgevlm.export

TABLE = Path(edgevlm.export.__file__).with_name("config_defaults.json")
SIZES = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "use_sliding_window", "sliding_window", "max_window_layers", "vocab_size",
)  # fmt: skip
SQUARE = (
    "hidden_act", "hidden_size", "image_size", "intermediate_size", "layer_norm_eps", "num_attention_heads", "num_channels",
    "num_hidden_layers", "patch_size",
)  # fmt: skip
PATCHED = (
    "deepstack_visual_indexes", "depth", "embed_dim", "fullatt_block_indexes", "hidden_act", "hidden_size", "in_channels",
    "intermediate_size", "mlp_ratio", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size",
    "spatial_merge_size", "temporal_patch_size", "tokens_per_second", "window_size",
)  # fmt: skip
MODEL = (
    "multimodal_projector_bias", "projector_hidden_act", "scale_factor", "spatial_pool_mode", "spatial_pool_stride",
    "tie_word_embeddings", "vision_feature_layer", "vision_feature_select_strategy",
)  # fmt: skip
KINDS = {
    **dict.fromkeys(("llava", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"), MODEL),
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), SIZES),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model", "smolvlm_vision"), SQUARE),
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision"), PATCHED),
}
_QWEN2 = ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")  # its video processor's needs torchvision
PROCESSORS = {
    "llava": ("llava.image_processing_pil_llava", "LlavaImageProcessorPil"),
    "llava_next_video": ("llava_next_video.video_processing_llava_next_video", "LlavaNextVideoVideoProcessor"),
    "llava_onevision": ("llava_onevision.video_processing_llava_onevision", "LlavaOnevisionVideoProcessor"),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": ("qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
    "smolvlm": ("smolvlm.video_processing_smolvlm", "SmolVLMVideoProcessor"),
    "CLIPImageProcessor": ("clip.image_processing_pil_clip", "CLIPImageProcessorPil"),
    "SiglipImageProcessor": ("siglip.image_processing_pil_siglip", "SiglipImageProcessorPil"),
    "LlavaImageProcessor": ("llava.image_processing_pil_llava", "LlavaImageProcessorPil"),
}
CROPPED = ("size", "crop_size", "do_center_crop")  # of those whose frames become a square
TEXTS = [kind for kind, keys in KINDS.items() if keys is SIZES]


def defaults() -> dict[str, dict[str, Any]]:
    """Model type -> the exporter's keys with transformers' defaults, but for those that follow from others."""
    import transformers

    table = {}
    for kind, keys in KINDS.items():
        config = transformers.CONFIG_MAPPING[kind]
        values = {field.name: field.default for field in dataclasses.fields(config)}
        values |= {"rope_parameters": getattr(config(), "rope_parameters", None)}
        table[kind] = {key: values[key] for key in keys if values.get(key) is not None}
    for kind, (module, name) in PROCESSORS.items():
        processor = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        keys = (
            "image_mean",
            "image_std",
            "resample",
            *(CROPPED if kind.lower().startswith(("clip", "siglip", "llava")) else ()),
        )
        table[f"{kind}/processor"] = {key: getattr(processor, key) for key in keys if getattr(processor, key, None) is not None}
    for kind in (kind for kind, keys in KINDS.items() if keys is MODEL):
        sections = transformers.CONFIG_MAPPING[kind].sub_configs_defaults
        table[f"{kind}/sections"] = {
            name: {"model_type": spec.model_type} | spec.init_kwargs for name, spec in sections.items()
        }
    return table


def written(table: dict[str, dict[str, Any]]) -> str:
    return "{\n" + ",\n".join(f'"{kind}": {json.dumps(values)}' for kind, values in table.items()) + "\n}\n"


def test_the_table_is_what_transformers_says() -> None:
    assert TABLE.read_text() == written(defaults()), "run this file as a script and read the difference"


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_decoder_is_sized_as_transformers_sizes_it(kind: str, seed: int) -> None:
    """Whatever a text_config leaves out."""
    import transformers

    from edgevlm.export.backbones import text_backbone
    from edgevlm.export.checkpoint import with_defaults

    random = np.random.default_rng(seed)
    full: dict[str, Any] = {
        "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 5,
        "vocab_size": 999, "intermediate_size": 777, "max_position_embeddings": 555, "rms_norm_eps": 1e-4,
        "attention_bias": kind == "llama", "rope_theta": 12345.0,
    }  # fmt: skip
    section = {key: value for key, value in full.items() if random.random() < 0.5}
    if "num_attention_heads" not in section or "num_key_value_heads" not in section:
        section.pop("num_attention_heads", None), section.pop("num_key_value_heads", None)
    theirs = transformers.CONFIG_MAPPING[kind](**section)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    if "vl" in kind:
        third = head_dim // 6
        section["rope_scaling"] = {"type": "mrope", "mrope_section": [head_dim // 2 - 2 * third, third, third]}
        theirs = transformers.CONFIG_MAPPING[kind](**json.loads(json.dumps(section)))
    shape = text_backbone(kind).shape(with_defaults(section | {"model_type": kind}), False)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.hidden, shape.intermediate) == (
        theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads, head_dim, theirs.hidden_size,
        theirs.intermediate_size,
    )  # fmt: skip
    assert (shape.vocab, shape.model_limit, shape.norm_eps, shape.rope_theta) == (
        theirs.vocab_size, theirs.max_position_embeddings, theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"],
    )  # fmt: skip


if __name__ == "__main__":
    TABLE.write_text(written(defaults()))

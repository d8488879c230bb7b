"""Tiny random checkpoints of the families that are not LLaVA's, with the tokens and templates that their processors expect."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from checkpoints import TEMPLATE, make_tokenizer, stretch

QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SMOLVLM = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "smolvlm": "SmolVLM"}
FRAME = (56, 84)  # (height, width) in pixels of the tiny Qwen checkpoints' frames: not square


def make_more(folder: Path, family: str, *, seed: int = 0, scale: float = 8.0, sharp: bool = False, **shape: Any) -> Path:
    """Save a random checkpoint of ``family`` in ``folder`` and return it. ``shape``: see the two makers; sharp: see stretch."""
    import transformers as t

    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN if family.startswith("qwen") else SMOLVLM})
    if family == "smolvlm":
        template = import_module("transformers.models.smolvlm.processing_smolvlm").DEFAULT_CHAT_TEMPLATE
    else:
        template = TEMPLATE.replace("'PLACE'", "'video'").replace("<PLACE>\n", "<|vision_start|><|video_pad|><|vision_end|>")
    tokenizer.chat_template = template
    config, processor = (_qwen if family.startswith("qwen") else _smolvlm)(t, family, tokenizer, **shape)
    model: Any = getattr(t, f"{CLASSES[family]}ForConditionalGeneration")(config)
    stretch(model, scale, sharp=sharp)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (Path(folder) / "processor_config.json").write_text(json.dumps({"video_processor": processor}))
    return Path(folder)


def text_sizes(tokenizer: Any, **shape: Any) -> dict[str, Any]:
    """A decoder of 64 columns, 4 heads on 2 and 2 layers, unless ``shape`` says otherwise."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id, **shape,
    }  # fmt: skip


def _qwen(
    t: Any, family: str, tokenizer: Any, *, depth: int = 2, tied: bool = False, **shape: Any
) -> tuple[Any, dict[str, Any]]:
    """``depth``: blocks of the tower; the rest are the decoder's own settings."""
    text = text_sizes(tokenizer, **shape)
    if family == "qwen3_vl":
        text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    half = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    vision: dict[str, Any] = {
        "depth": depth,
        "num_heads": 2,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": text["hidden_size"]}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 42, "fullatt_block_indexes": [depth - 1], "tokens_per_second": 2}
    if family == "qwen3_vl":
        rope |= {"mrope_interleaved": True}
        vision |= {
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": list(range(min(depth, text["num_hidden_layers"]))),
        }
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    kind = getattr(t, f"{CLASSES[family]}Config")
    config = kind(text_config=text | {"rope_parameters": rope}, vision_config=vision, tie_word_embeddings=tied, **ids)
    processor = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3,
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.3, 0.2],
        "rescale_factor": 1 / 255, "patch_size": 7, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 14 * 14, "longest_edge": 200 * 200},
    }  # fmt: skip
    return config, processor


def _smolvlm(
    t: Any, family: str, tokenizer: Any, *, side: int = 6, scale_factor: int = 2, tied: bool = False, **shape: Any
) -> tuple[Any, dict[str, Any]]:
    """``side``: patches along a frame's edge, of 8 pixels."""
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 8 * side, "patch_size": 8,
    }  # fmt: skip
    text = t.LlamaConfig(**text_sizes(tokenizer, **shape), tie_word_embeddings=tied, pad_token_id=tokenizer.pad_token_id)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = t.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=scale_factor, image_token_id=image, tie_word_embeddings=tied
    )
    processor = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "resample": 1, "rescale_factor": 1 / 255, "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 8 * side},
    }  # fmt: skip
    return config, processor


def make_internvl(folder: Path) -> Path:
    """Save a random InternVL 3 checkpoint, as transformers has it: InternViT with layer scale over Qwen2."""
    import transformers as t

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "</img>", "<IMG_CONTEXT>"]})
    tokenizer.chat_template = TEMPLATE.replace("'PLACE'", "'video'").replace("<PLACE>\n", "<video>")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    vision = t.InternVLVisionConfig(
        **sizes, image_size=[56, 56], patch_size=[14, 14], attention_bias=True, layer_scale_init_value=0.5
    )
    place = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = t.InternVLConfig(vision_config=vision, text_config=t.Qwen2Config(**text_sizes(tokenizer)), image_token_id=place)
    model: Any = t.InternVLForConditionalGeneration(config)
    stretch(model, 8.0, sharp=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sides = {"size": {"height": 56, "width": 56}, "resample": 3, "rescale_factor": 1 / 255}
    steps = dict.fromkeys(("do_resize", "do_normalize", "do_rescale"), True)
    means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(means | sides | steps))
    return Path(folder)


def make_gemma(folder: Path, **text: Any) -> Path:
    """Save a random Gemma 3 checkpoint: windows of 9 positions in three of four layers, and two rotary bases."""
    import transformers as t

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]})
    tokenizer.chat_template = TEMPLATE.replace("'PLACE'", "'image'").replace("<PLACE>\n", "<start_of_image>")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    vision = t.SiglipVisionConfig(**sizes, image_size=56, patch_size=14, vision_use_head=False)
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    shape = text_sizes(
        tokenizer, num_hidden_layers=4, head_dim=24, query_pre_attn_scalar=40, sliding_window=9, rope_parameters=rope
    )
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    place = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    text_config = t.Gemma3TextConfig(**shape | {"layer_types": layers} | text)
    config = t.Gemma3Config(vision_config=vision, text_config=text_config, mm_tokens_per_image=4, image_token_id=place)
    model: Any = t.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "projection_weight")):
                parameter.normal_(std=0.3)
    stretch(model, 8.0, sharp=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sides = {"size": {"height": 56, "width": 56}, "resample": 2, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3}
    steps = dict.fromkeys(("do_resize", "do_normalize", "do_rescale"), True)
    about = sides | steps | {"image_std": [0.5] * 3, "image_processor_type": "Gemma3ImageProcessor"}
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(about))
    return Path(folder)

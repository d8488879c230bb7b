"""A checkpoint of random weights at a real model's shape, as ``save_pretrained`` writes one: it runs in transformers too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgevlm.bench.seeded import llava_onevision_05b
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Progress

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
VOCAB = 152_000
SIDE = 384


def llava_onevision_config() -> Any:
    """LLaVA-OneVision-0.5B's configuration: SigLIP-so400m's tower, 384 pixels, 196 tokens a frame, Qwen2-0.5B."""
    s = llava_onevision_05b()
    text = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, max_position_embeddings=s.model_limit,
        rms_norm_eps=s.norm_eps, tie_word_embeddings=s.tied,
        rope_parameters={"rope_theta": s.rope_theta, "rope_type": "default"},
    )  # fmt: skip
    vision = transformers.SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=26, num_attention_heads=16, image_size=SIDE, patch_size=14,
        vision_use_head=False,
    )  # fmt: skip
    return transformers.LlavaOnevisionConfig(
        vision_config=vision, text_config=text, vision_feature_layer=-1, vision_feature_select_strategy="full",
        tie_word_embeddings=s.tied,
    )  # fmt: skip


def write(folder: Path, config: Any | None = None, seed: int = 0, progress: Progress = lambda what: None) -> Path:
    """Save a LLaVA-OneVision checkpoint of ``config``, the 0.5B one unless given, in bfloat16; returns the folder.

    Weights are as transformers initialises them, the same for the same seed and torch. Its tokenizer has a token a byte and the
    marks of ChatML. Raises UserError where there is something already, or nothing can be written.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise UserError(f"--out {folder}: there is something already; give a new folder")
    config = config or llava_onevision_config()
    tokenizer = byte_tokenizer()
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    config.image_token_id = config.image_token_index = ids["<image>"]
    config.video_token_id = config.video_token_index = ids["<video>"]
    config.text_config.eos_token_id = ids["<|im_end|>"]
    progress("drawing random weights")
    torch.manual_seed(seed)
    model = transformers.LlavaOnevisionForConditionalGeneration(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    progress(f"writing {2 * size / 1e6:,.0f} MB to {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_settings(folder, config.vision_config.image_size)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror or error})") from None
    return folder


def byte_tokenizer() -> Tokenizer:
    """A token a byte, then MARKS: any text encodes and decodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*MARKS])
    return tokenizer


def _write_settings(folder: Path, side: int) -> None:
    """Chat template and special tokens, and how frames are prepared: scaled to -1..1 at the tower's side."""
    chat = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **chat}))
    half = [0.5] * 3
    frames = {"do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": half, "image_std": half,
              "resample": 3, "rescale_factor": 1 / 255, "size": {"height": side, "width": side}}  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": frames, "video_token": "<video>"}))

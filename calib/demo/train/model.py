"""The demo model: a 1.3 M parameter LlavaForConditionalGeneration, and its checkpoint as Hugging Face writes one."""

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from ..world import CELL, SIZE
from .tokenizer import ASSISTANT, BOS, EOS, IMAGE, PAD, USER, build_tokenizer

PATCHES = (SIZE // CELL) ** 2  # vision tokens a frame
TRAINED_LENGTH = 2368  # largest position trained, plus one


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """A freshly initialised model (torch's global seed)."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (PAD, BOS, EOS, IMAGE)}
    vision = SiglipVisionConfig(
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=SIZE,
        patch_size=CELL,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        pad_token_id=ids[PAD],
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=ids[IMAGE],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=PATCHES,
        tie_word_embeddings=True,
        edgevlm_trained_length=TRAINED_LENGTH,
    )
    return LlavaForConditionalGeneration(config).float()


def save_model(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write the standard checkpoint: config, weights, tokenizer, chat template, image processor, generation config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    SiglipImageProcessor(
        size={"height": SIZE, "width": SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3, rescale_factor=1 / 255
    ).save_pretrained(folder)


def pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 56, 56, 3] RGB to the tower's float32 [N, 3, 56, 56] of -1..1."""
    return frames.permute(0, 3, 1, 2).float() / 127.5 - 1


def features(model: LlavaForConditionalGeneration, frames: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 56, 56, 3] to the tower's features before the projector, float32 [N, 16, 96]."""
    return model.model.vision_tower(pixels(frames), output_hidden_states=True).hidden_states[-1]


def prefix_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What the chat template puts before the vision tokens."""
    return tokenizer.convert_tokens_to_ids([BOS, USER])


def turn_ids(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> tuple[list[int], list[int]]:
    """A turn as the template writes it after its <user>: (question and <assistant>, answer and <eos>)."""
    asked = tokenizer.encode(question, add_special_tokens=False) + tokenizer.convert_tokens_to_ids([ASSISTANT])
    return asked, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]

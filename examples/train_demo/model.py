"""Make the demo model: its tokenizer, chat template, LlavaForConditionalGeneration of 1.3 M parameters, and checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from edgevlm.calib.demo.questions import ANSWERS
from edgevlm.calib.demo.world import GRID, SIZE
from edgevlm.runtime.taught import KINDS

PAD, BOS, EOS, UNK, USER, ASSISTANT, IMAGE = SPECIAL = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<image>",
)  # fmt: skip

# The clip's placeholder occurs once, in the first user turn. All frames' tokens, 16 each, go there without separators.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<user>{% else %}<assistant>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for item in message.content %}"
    "{% if item.type == 'text' %}{{ item.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words() -> list[str]:
    """Return all words and marks in questions and answers, sorted."""
    phrasings = (text for kind in KINDS.values() for text in kind.phrasings)
    texts = (*phrasings, *ANSWERS, "an")
    return sorted({word for text in texts for word in re.findall(r"\w+|\?", re.sub(r"<\w+>", "", text))})


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT, IMAGE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    asked_of: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention of packed rows, [B, V + Q, Hq, D], as transformers expects it.

    query: [B, Hq, V + Q, D]. key, value: [B, Hkv, V + Q, D]. attention_mask: bool [B, 1, Q, V + Q], for the last Q rows.
    `asked_of` collects the first KV head's queries [B, Hq / Hkv, Q, D] and keys [B, V + Q, D] in each layer.
    """
    vision = query.shape[2] - attention_mask.shape[2]
    if asked_of is not None:
        asked_of.append((query[:, : module.num_key_value_groups, vision:], key[:, 0]))
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    seen = scaled_dot_product_attention(query[:, :, :vision], key[:, :, :vision], value[:, :, :vision], is_causal=True)
    asked = scaled_dot_product_attention(query[:, :, vision:], key, value, attn_mask=attention_mask)
    return torch.cat([seen, asked], dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("edgevlm_packed", packed_attention)


PATCHES = GRID**2  # vision tokens per frame
TRAINED_LENGTH = 2368  # the largest trained position, plus one


def build_model(tokenizer: PreTrainedTokenizerFast, size: int = SIZE) -> LlavaForConditionalGeneration:
    """Return a model for frames of `size` x `size` pixels, initialised with torch's global seed."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (PAD, BOS, EOS, IMAGE)}
    vision = SiglipVisionConfig(
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=size,
        patch_size=size // GRID,
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
    """Write a standard checkpoint: config, weights, tokenizer, chat template, image processor, generation config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, size = build_tokenizer(), model.config.vision_config.image_size
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
        size={"height": size, "width": size}, image_mean=[0.5] * 3, image_std=[0.5] * 3, rescale_factor=1 / 255
    ).save_pretrained(folder)


def pixels(frames: torch.Tensor) -> torch.Tensor:
    """Convert RGB frames, uint8 [N, H, W, 3], to the tower's input, float32 [N, 3, H, W] in -1..1."""
    return frames.permute(0, 3, 1, 2).float() / 127.5 - 1


def features(model: LlavaForConditionalGeneration, frames: torch.Tensor) -> torch.Tensor:
    """Return the tower's features before the projector, float32 [N, 16, 96]. frames: uint8 [N, H, W, 3]."""
    return model.model.vision_tower(pixels(frames), output_hidden_states=True).hidden_states[-1]


def prefix_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens that the chat template puts before the vision tokens."""
    return tokenizer.convert_tokens_to_ids([BOS, USER])


def turn_ids(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return a turn's tokens after <user>, as the chat template writes them: (question and <assistant>, answer and <eos>)."""
    asked = tokenizer.encode(question, add_special_tokens=False) + tokenizer.convert_tokens_to_ids([ASSISTANT])
    return asked, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]

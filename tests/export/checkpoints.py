"""Tiny random checkpoints of every family, saved as transformers saves them, with a real tokenizer and chat template.

``import checkpoints`` works in any test below a conftest that puts this folder on ``sys.path``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = """
    system user assistant how many are there now what color was the square circle which shape came first red green blue
    you see a an is of in 0 1 2 3 4 5 6 7 8 9 yes no hello world watch answer question left right top bottom
"""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'PLACE' %}{{ '<PLACE>\n' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
TOOLS_TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'][0]['text'] }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call one as <tool_call>{"name": .., "arguments": {..}}</tool_call><|im_end|>
{% endif %}{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') -%}
<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}
{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>
{%- elif message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif item['type'] == 'text' -%}
{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLACES = {"llava": "image", "llava_next_video": "video", "llava_onevision": "video"}


def make_tokenizer() -> Any:
    """A byte-fallback word tokenizer of a few hundred tokens with ChatML specials: any text encodes and decodes."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in TEXT.split():
        text = "Ġ" + word
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>", "<video>"]})
    return fast


def stretch(model: Any, scale: float, *, sharp: bool = False) -> None:
    """Decoder layers ``scale`` times as they are initialised; biases, and norms of heads, random.

    sharp: the tower's too, which then makes more of what it sees than of its biases.
    """
    layers = ["language_model.layers", "text_model.layers", "lm_head", *(["vis", "connector", "projector"] if sharp else [])]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.normal_(1.0, 0.3)
            elif parameter.ndim > 1 and any(layer in name for layer in layers):
                parameter.mul_(scale)


def make_checkpoint(
    folder: Path,
    family: str = "llava_onevision",
    *,
    layers: int = 3,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int | None = None,
    hidden: int = 96,
    intermediate: int = 128,
    tied: bool = False,
    side: int = 4,
    vision_layers: int = 2,
    feature_layer: int = -1,
    max_positions: int = 4096,
    trained_length: int | None = None,
    rope_theta: float = 1e6,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    seed: int = 0,
    scale: float = 8.0,
    backbone: str = "qwen2",
    tower: str = "siglip",
    biases: bool = False,
    sharp: bool = False,
) -> Path:
    """Save a random ``family`` checkpoint in ``folder`` and return it.

    ``side`` is the patches along a frame's edge (14 pixels each). Decoder layers are ``scale`` times the usual
    initialisation and biases are random, so that logits differ enough for greedy decoding to mean something.
    """
    import transformers as t

    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("PLACE", PLACES[family])
    sizes = {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": vision_layers, "num_attention_heads": 4,
        "image_size": 14 * side, "patch_size": 14,
    }  # fmt: skip
    vision = t.CLIPVisionConfig(**sizes) if tower == "clip" else t.SiglipVisionConfig(**sizes, vision_use_head=False)
    extra: dict[str, Any] = {} if head_dim is None else {"head_dim": head_dim}
    if backbone != "qwen2":
        extra |= {"attention_bias": biases} | ({"mlp_bias": biases} if backbone == "llama" else {})
    text = getattr(t, {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[backbone])(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": rope_theta, "rope_type": "default"}, tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id, **extra,
    )  # fmt: skip
    common: dict[str, Any] = {
        "vision_config": vision,
        "text_config": text,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_layer": feature_layer,
        "vision_feature_select_strategy": "default" if tower == "clip" else "full",
        "tie_word_embeddings": tied,
    }
    if family == "llava":
        config: Any = t.LlavaConfig(**common, image_seq_length=side * side)
        model: Any = t.LlavaForConditionalGeneration(config)
    elif family == "llava_next_video":
        config = t.LlavaNextVideoConfig(**common, video_token_index=tokenizer.convert_tokens_to_ids("<video>"))
        model = t.LlavaNextVideoForConditionalGeneration(config)
    else:
        config = t.LlavaOnevisionConfig(**common, video_token_index=tokenizer.convert_tokens_to_ids("<video>"))
        model = t.LlavaOnevisionForConditionalGeneration(config)
    if trained_length is not None:
        model.config.edgevlm_trained_length = trained_length
    stretch(model, scale, sharp=sharp)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    frames = {
        "do_resize": True, "do_center_crop": False, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3, "rescale_factor": 1 / 255, "size": {"height": 14 * side, "width": 14 * side},
    }  # fmt: skip
    key = "image_processor" if family == "llava" else "video_processor"
    (Path(folder) / "processor_config.json").write_text(json.dumps({key: frames, f"{PLACES[family]}_token": "x"}))
    return Path(folder)


def make_deep(folder: Path) -> Path:
    """Ten layers, of each of HERMES's classes: one shallow, six middle, three deep."""
    return make_checkpoint(folder, layers=10, hidden=48, intermediate=64, head_dim=8, max_positions=2048)

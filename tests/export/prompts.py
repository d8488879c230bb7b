"""Checkpoint folders without weights, for prompts' token ids, and what the exporter makes of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgevlm.export.chat import chat
from edgevlm.export.checkpoint import ConfigOnly
from edgevlm.export.families import load_family
from edgevlm.runtime.bundle import ChatSpec

PLACES = {"llava": "<image>", "llava_next_video": "<video>", "llava_onevision": "<video>", "smolvlm": "<image>"}
PLACES |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<video>")
MARKS = ["<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>", "<global-img>"]  # around frames
FLAGS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")


def folder_of(folder: Path, family: str, made: Tokenizer, settings: dict[str, Any], template: str) -> Path:
    """A checkpoint's files without weights."""
    made = Tokenizer.from_str(made.to_str())
    made.add_special_tokens([PLACES[family], *(MARKS if family in ("qwen3_vl", "smolvlm") else [])])
    place, numbers = made.token_to_id(PLACES[family]), itertools.count(made.get_vocab_size())
    words = {token["content"]: next(numbers) for token in settings.get("added_tokens", [])}
    settings = {key: value for key, value in settings.items() if key != "added_tokens"}
    if "added_tokens_decoder" in settings:
        known = made.get_added_tokens_decoder().values()
        listed = [{name: getattr(token, name) for name in FLAGS} for token in known] + settings["added_tokens_decoder"]
        by_word = {token["content"]: token for token in listed}
        ids = {token.content: number for number, token in made.get_added_tokens_decoder().items()}
        numbered = {ids[word] if word in ids else next(numbers): token for word, token in by_word.items()}
        settings["added_tokens_decoder"] = {str(number): token for number, token in numbered.items()}
    is_qwen = family.startswith("qwen")
    config = {
        "model_type": family, f"{PLACES[family][1:-1]}_token_{'index' if family.startswith('llava') else 'id'}": place,
        "text_config": {"model_type": f"{family}_text" if is_qwen else "llama", "eos_token_id": 2},
    }  # fmt: skip
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {"config.json": config, "tokenizer_config.json": settings}
    if mapped := settings.pop("special_tokens_map", None):
        files["special_tokens_map.json"] = mapped
    for name, content in (files | ({"added_tokens.json": words} if words else {})).items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def ours(folder: Path, vocab: int = 400) -> tuple[ChatSpec, Tokenizer]:
    checkpoint = ConfigOnly(folder)
    talk, text = chat(checkpoint, load_family(checkpoint.config["model_type"], folder), vocab)
    return ChatSpec(**talk), Tokenizer.from_str(text)

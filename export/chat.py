"""The checkpoint's chat template, special tokens and stop tokens, checked against its tokenizer."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import Family
from edgevlm.export.settings import check_settings
from edgevlm.runtime.bundle import ChatSpec
from edgevlm.runtime.chat import Chat

TOKENIZER = "tokenizer.json"
_MARK = re.compile(r"<[^<>{}\s]+>")


def chat(checkpoint: Checkpoint, family: Family, vocab: int) -> tuple[dict[str, Any], str]:
    """The bundle's ``chat`` section and the text of its tokenizer file.

    Raises UserError if the tokenizer or the template is missing, or if they disagree with ``config.json`` about the
    token that stands for what is watched.
    """
    file, text = checkpoint.folder / TOKENIZER, checkpoint.text(TOKENIZER)
    if text is None:
        raise UserError(f"{file}: is missing; save the tokenizer beside the model in its fast form")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise UserError(f"{file}: cannot be read ({error}); save the tokenizer again") from None
    again = "save the tokenizer that belongs to the model"
    if (known := tokenizer.get_vocab_size()) > vocab:
        raise UserError(f"{file}: has {known} tokens and the model embeds {vocab}; {again}")
    template = _template(checkpoint)
    if family.placeholder and family.placeholder not in template:
        template = family.template or template
    placeholder_id = next((checkpoint.config[key] for key in family.token_keys if key in checkpoint.config), None)
    if not isinstance(placeholder_id, int):
        raise UserError(f"{checkpoint.folder / 'config.json'}: has no {family.token_keys[0]}")
    added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
    marks = _MARK.findall(family.opening + family.before + family.after + family.ending)
    if placeholder_id not in added or not set(added.values()) >= set(marks):
        raise UserError(f"{file}: lacks token {placeholder_id}, the {family.content_type} of config.json, {marks}; {again}")
    placeholder = family.placeholder or added[placeholder_id]
    if placeholder.join(family.around) in template:
        placeholder = placeholder.join(family.around)
    if placeholder not in template:
        place = f"the {family.content_type}'s place"
        raise UserError(f"{checkpoint.folder}: the chat template never writes {placeholder!r}, {place}")
    special = _special_tokens(checkpoint)
    talk: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "template": template,
        "content_type": family.content_type,
        "placeholder": placeholder,
        "placeholder_id": placeholder_id,
        "opening": family.opening,
        "ending": family.ending,
        "special_tokens": special,
        "stop_ids": _stop_ids(checkpoint, tokenizer, special, vocab),
    }
    try:
        Chat(ChatSpec(**talk)).suffix([("a question", "an answer")], "another")
    except UserError as error:
        raise UserError(f"{checkpoint.folder}: {error}") from None
    return talk, text


def _template(checkpoint: Checkpoint) -> str:
    template: Any = checkpoint.text("chat_template.jinja")
    for file in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        if template is None:
            template = (checkpoint.json(file) or {}).get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(template, str) or not template.strip():
        raise UserError(
            f"{checkpoint.folder / 'chat_template.jinja'}: is missing; a model without a chat template cannot be asked"
        )
    return template


def _special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    special: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (checkpoint.json(file) or {}).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                special[key] = content
    return dict(sorted(special.items()))


def _stop_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, special: dict[str, str], vocab: int) -> list[int]:
    file, generation = checkpoint.folder / "generation_config.json", checkpoint.json("generation_config.json") or {}
    check_settings(file, generation)
    ids: set[Any] = {tokenizer.token_to_id(special["eos_token"])} if "eos_token" in special else set()
    for config in (generation, checkpoint.config, checkpoint.section("text_config")):
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value])
    stops: list[int] = sorted(ids - {None})
    if not stops or stops[-1] >= vocab:
        raise UserError(f"{file}: its stop tokens are {stops}, of a vocabulary of {vocab}; set eos_token_id")
    return stops

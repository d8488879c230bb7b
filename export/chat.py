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
    text = checkpoint.text(TOKENIZER)
    if text is None:
        raise UserError(f"{checkpoint.folder / TOKENIZER}: is missing; save the tokenizer beside the model in its fast form")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise UserError(f"{checkpoint.folder / TOKENIZER}: cannot be read ({error}); save the tokenizer again") from None
    if (known := tokenizer.get_vocab_size()) > vocab:
        raise UserError(
            f"{checkpoint.folder / TOKENIZER}: has {known} tokens and the model embeds {vocab}; "
            "save the tokenizer that belongs to the model"
        )
    template = _template(checkpoint)
    if family.placeholder and family.placeholder not in template:
        template = family.template or template
    placeholder_id = next((checkpoint.config[key] for key in family.token_keys if key in checkpoint.config), None)
    if not isinstance(placeholder_id, int):
        raise UserError(f"{checkpoint.folder / 'config.json'}: has no {family.token_keys[0]}")
    placeholder = tokenizer.id_to_token(placeholder_id)
    if placeholder is None or placeholder_id not in tokenizer.get_added_tokens_decoder():
        raise UserError(
            f"{checkpoint.folder / TOKENIZER}: token {placeholder_id}, the {family.content_type} of config.json, "
            "is not one added token; save the tokenizer that belongs to the model"
        )
    placeholder = family.placeholder or placeholder
    if placeholder.join(family.around) in template:
        placeholder = placeholder.join(family.around)
    if placeholder not in template:
        raise UserError(
            f"{checkpoint.folder}: the chat template never writes {placeholder!r}, the {family.content_type}'s place"
        )
    _check_marks(checkpoint, family, tokenizer)
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


def _check_marks(checkpoint: Checkpoint, family: Family, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer to which a mark that the family writes around its frames is no token of its own."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for mark in _MARK.findall(family.opening + family.before + family.after + family.ending):
        if mark not in added:
            raise UserError(
                f"{checkpoint.folder / TOKENIZER}: has no token {mark!r}, which stands around this family's frames; "
                "save the tokenizer that belongs to the model"
            )


def _template(checkpoint: Checkpoint) -> str:
    """The default template, wherever a transformers version keeps it."""
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
    """``bos_token`` and the like, as text: what the template may refer to."""
    special: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (checkpoint.json(file) or {}).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                special[key] = content
    return dict(sorted(special.items()))


def _stop_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, special: dict[str, str], vocab: int) -> list[int]:
    """Every token that ends an answer: the generation and model configurations' and the tokenizer's own."""
    generation = checkpoint.json("generation_config.json") or {}
    check_settings(checkpoint.folder / "generation_config.json", generation)
    ids: set[int] = set()
    for config in (generation, checkpoint.config, checkpoint.section("text_config")):
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    if "eos_token" in special:
        token = tokenizer.token_to_id(special["eos_token"])
        ids.update([] if token is None else [token])
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong or not ids:
        what = f"stop token {wrong[0]} is outside the vocabulary of {vocab}" if wrong else "no stop token is named"
        raise UserError(f"{checkpoint.folder / 'generation_config.json'}: {what}; set eos_token_id")
    return sorted(ids)

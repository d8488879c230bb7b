"""Read a checkpoint's chat template, special tokens and generation settings, and check that its tokenizer fits them."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import Family
from edgevlm.export.settings import check_settings
from edgevlm.export.tokenizer import AGAIN, TOKENIZER, read_tokenizer
from edgevlm.runtime.bundle import ChatSpec
from edgevlm.runtime.chat import Chat, encode_inside, video_mark

GENERATION = "generation_config.json"
_MARK = re.compile(r"<[^<>{}\s]+>")
_CHANGING = {  # unsupported settings of ``generate`` -> the value at which the setting has no effect
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
         "sequence_bias", "stop_strings", "penalty_alpha", "dola_layers", "constraints", "force_words_ids",
         "exponential_decay_length_penalty", "token_healing", "watermarking_config")
    ),
}  # fmt: skip


def chat(checkpoint: Checkpoint, family: Family, vocab: int) -> tuple[dict[str, Any], str]:
    """Return the bundle's ``chat`` section and the content of its tokenizer file.

    Raises UserError if the tokenizer or the template is missing, or if the tokenizer lacks the token for videos that
    ``config.json`` names.
    """
    file = checkpoint.folder / TOKENIZER
    tokenizer, special = read_tokenizer(checkpoint, family, vocab)
    template = family.template or _template(checkpoint)
    placeholder_id = next((checkpoint.config[key] for key in family.token_keys if key in checkpoint.config), None)
    if not isinstance(placeholder_id, int):
        raise UserError(f"{checkpoint.folder / 'config.json'}: has no {family.token_keys[0]}")
    added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
    marks = _MARK.findall(family.opening + family.before + family.after + family.ending)
    if placeholder_id not in added or not set(added.values()) >= set(marks):
        what = f"required tokens are missing ({family.content_type} token {placeholder_id} of config.json, {marks})"
        raise UserError(f"{file}: {what}; {AGAIN}")
    placeholder = family.placeholder or added[placeholder_id]
    talk: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "template": template,
        "content_type": family.content_type,
        "placeholder": placeholder,
        "placeholder_id": placeholder_id,
        "opening": family.opening,
        "ending": family.ending,
        "special_tokens": special,
        "adds_special": tokenizer.num_special_tokens_to_add(False) > 0,
        **_generation(checkpoint, family, tokenizer, special, vocab),
    }
    try:
        whole = placeholder.join(family.around)
        if whole in Chat(ChatSpec(**talk), tokenizer).text([], "", placeholder):
            talk["placeholder"] = whole
        _check_prompt(family, ChatSpec(**talk), tokenizer)
    except UserError as error:
        raise UserError(f"{checkpoint.folder}: {error}") from None
    return talk, tokenizer.to_str(pretty=True)


def _check_prompt(family: Family, spec: ChatSpec, tokenizer: Tokenizer) -> None:
    """Raise UserError unless tokenising a prompt's parts separately gives the same tokens as tokenising the whole prompt."""
    chat, video, turns = Chat(spec, tokenizer), spec.placeholder_id, [("a question", "an answer")]
    if chat.text([], "a question", "\0").partition("\0")[0] != chat.prefix_text:
        raise UserError("the chat template puts the question before the video; change it so that the video comes first")
    mark, time = video_mark(tokenizer, spec), {"seconds": 1.0, "minutes": 0, "second": 1, "frame": 1}
    before, after = family.before.format(**time), family.after.format(**time)
    frame = [*encode_inside(tokenizer, spec, before), video, *encode_inside(tokenizer, spec, after)]
    parts = [*chat.prefix, *frame * 2, *chat.suffix(turns, "another")]
    if parts != chat.ids(turns, "another", (before + mark + after) * 2):
        raise UserError(f"{TOKENIZER} merges the text around frames with the prompt's text; {AGAIN}")


def _template(checkpoint: Checkpoint) -> str:
    template: Any = checkpoint.text("chat_template.jinja")
    for file in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        if template is None:
            template = (checkpoint.json(file) or {}).get("chat_template")
    if isinstance(template, list):  # a list of named templates
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(template, str) or not template.strip():
        raise UserError(
            f"{checkpoint.folder / 'chat_template.jinja'}: is missing; add the model's chat template, which questions require"
        )
    return template


def _generation(
    checkpoint: Checkpoint, family: Family, tokenizer: Tokenizer, special: dict[str, str], vocab: int
) -> dict[str, Any]:
    """Return the stop tokens and repetition settings that transformers' ``generate`` uses for greedy answers."""
    file, settings, text = checkpoint.folder / GENERATION, checkpoint.json(GENERATION), checkpoint.section("text_config")
    if settings is None:
        file, settings = checkpoint.folder / "config.json", text | checkpoint.config
    check_settings(file, settings)
    for name, neutral in _CHANGING.items():
        if (value := settings.get(name)) not in (None, neutral, [], {}) and value is not False:
            raise UserError(f"{file}: {name} = {str(value)[:40]} is not supported, so answers would differ; remove it")
    configs = settings, checkpoint.config, text
    stops: Any = next((found for each in configs if (found := each.get("eos_token_id")) not in (None, [])), None)
    if stops is None and "eos_token" in special:
        stops = tokenizer.token_to_id(special["eos_token"])
    stops = list(dict.fromkeys(stops if isinstance(stops, list) else [stops] if stops is not None else []))
    if not stops or max(stops) >= vocab:
        raise UserError(f"{file}: stop tokens must be ids below {vocab}, not {stops}; set eos_token_id")
    names = "repetition_penalty", "no_repeat_ngram_size"
    found = {name: value for name in names if (value := settings.get(name)) is not None}
    if family.before and found.get("no_repeat_ngram_size"):
        what = "no_repeat_ngram_size is not supported for models with text between frames"
        raise UserError(f"{file}: {what}; remove it")
    return {"stop_ids": stops, **found}

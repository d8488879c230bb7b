"""Build a checkpoint's tokenizer as transformers does, from tokenizer.json, tokenizer_config.json and added_tokens.json."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json, to_json
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from edgevlm.errors import UserError, is_fault
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import Family
from edgevlm.runtime.sandbox import try_tokenizer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
AGAIN = "save the tokenizer that belongs to the model"
_AS_SAVED = ("", "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend")  # classes that use tokenizer.json unchanged
_USUAL = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
_FIRST = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"}
_QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_tokenizer(checkpoint: Checkpoint, family: Family, vocab: int) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer and its named tokens, such as ``bos_token``, for chat templates.

    Raises UserError if the tokenizer is missing, cannot be read, or has a token whose id is ``vocab`` or more, so that the
    model has no embedding for it.
    """
    file, text = checkpoint.folder / TOKENIZER, checkpoint.text(TOKENIZER)
    if text is None:
        raise UserError(f"{file}: is missing; save the fast tokenizer with the model")
    settings = checkpoint.json(SETTINGS) or {}
    kind = _class(checkpoint, family, settings, text)
    if settings.get("split_special_tokens"):
        raise UserError(f"{checkpoint.folder / SETTINGS}: split_special_tokens splits the video token; remove it")
    try:
        try_tokenizer(file)
        tokenizer = _rebuilt(kind, text, settings) if kind else Tokenizer.from_str(text)
    except BaseException as error:
        if not is_fault(error):
            raise
        raise UserError(f"{file}: cannot be read ({error}); save the tokenizer again") from None
    padding = tokenizer.padding or {}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special, extra = _named(checkpoint, {"pad_token": padding.get("pad_token")} | _USUAL.get(kind, {}) | settings)
    _add(tokenizer, checkpoint, settings, special, extra)
    if kind == "Qwen2Tokenizer":  # transformers drops the flags of special tokens
        tokenizer.add_special_tokens([token.content for token in [*special.values(), *extra]])
    content, largest = max(tokenizer.get_vocab().items(), key=lambda token: token[1], default=("", 0))
    if largest >= vocab:
        raise UserError(f"{file}: token {content!r} has id {largest}, but the model embeds only {vocab}; {AGAIN}")
    return tokenizer, {name: token.content for name, token in sorted(special.items()) if name.endswith("_token")}


def _class(checkpoint: Checkpoint, family: Family, settings: dict[str, Any], text: str) -> str:
    """Return the name of the transformers class that replaces parts of tokenizer.json, or an empty string."""
    if family.tokenizer_class is None:
        return ""
    named = settings.get("tokenizer_class") or checkpoint.config.get("tokenizer_class")
    kind = (named if isinstance(named, str) else family.tokenizer_class).removesuffix("Fast")
    if kind in _AS_SAVED or (kind == "LlamaTokenizer" and '"ByteLevel"' in text):
        return ""
    if kind not in ("LlamaTokenizer", "Qwen2Tokenizer"):
        what = "set tokenizer_class to PreTrainedTokenizerFast if tokenizer.json is complete"
        raise UserError(f"{checkpoint.folder / SETTINGS}: tokenizer_class {kind[:80]!r} is not supported; {what}")
    return kind


def _rebuilt(kind: str, text: str, settings: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer built like transformers' class ``kind``, but with the vocabulary from tokenizer.json."""
    content, is_llama = from_json(text), kind == "LlamaTokenizer"
    content["model"] |= {
        "dropout": None, "unk_token": None, "fuse_unk": is_llama, "byte_fallback": is_llama,
        "continuing_subword_prefix": None if is_llama else "", "end_of_word_suffix": None if is_llama else "",
        "ignore_merges": False,
    }  # fmt: skip
    if "added_tokens_decoder" in settings:
        content["added_tokens"] = []
    tokenizer = Tokenizer.from_str(to_json(content).decode())
    spaced = settings.get("add_prefix_space")
    if is_llama:
        spaced = spaced is None or spaced
        scheme = ("always" if settings.get("legacy") else "first") if spaced else "never"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if spaced else [])])
    else:
        words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
        parts = pre_tokenizers.ByteLevel(add_prefix_space=bool(spaced), use_regex=False)
        tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
    return tokenizer


def _named(checkpoint: Checkpoint, values: dict[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the named special tokens by name, and a list of the unnamed special tokens."""
    if "added_tokens_decoder" not in values:
        values |= checkpoint.json("special_tokens_map.json") or {}
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    named = {
        name: value for name, value in values.items() if name.endswith("_token") and isinstance(value, str | dict) and value
    }
    named = {name: named[name] for name in _FIRST if name in named} | named  # new tokens are numbered in the order of _FIRST
    if isinstance(extra, dict):
        named, extra = named | extra, []
    if not isinstance(extra, list):
        raise UserError(f"{checkpoint.folder / SETTINGS}: extra_special_tokens must be a list or an object; {AGAIN}")
    return {name: _token(checkpoint, value) for name, value in named.items()}, [_token(checkpoint, value) for value in extra]


def _add(
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    settings: dict[str, Any],
    special: dict[str, AddedToken],
    extra: list[AddedToken],
) -> None:
    """Add the tokens that tokenizer.json lacks.

    Raises UserError if a token would get a different id from the one in the checkpoint.
    """
    usual = {token.content for token in [*(special[name] for name in _FIRST if name in special), *extra]}
    where, declared = SETTINGS, settings.get("added_tokens_decoder")
    try:
        if declared is None:
            where, words = "added_tokens.json", checkpoint.json("added_tokens.json") or {}
            declared = {
                int(number): {"content": word, "special": word in usual, "normalized": word not in usual}
                for word, number in words.items()
            }
        tokens = sorted((int(number), _token(checkpoint, token)) for number, token in declared.items())
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise UserError(f"{checkpoint.folder / where}: does not map ids to tokens; {AGAIN}") from None
    known = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    named = {token.content for token in special.values()}
    for number, token in tokens:
        if token.content not in known or (where == SETTINGS and known[token.content] != repr(token)):
            token.special |= token.content in named
            tokenizer.add_tokens([token])
            found = tokenizer.token_to_id(token.content)
            if token.content not in known and found != number:
                what = f"token {token.content!r} has id {number}, but {found} in {TOKENIZER}"
                raise UserError(f"{checkpoint.folder / where}: {what}; {AGAIN}")
    listed = {*known, *(token.content for _, token in tokens)}
    tokenizer.add_special_tokens([token for token in [*special.values(), *extra] if token.content not in listed])


def _token(checkpoint: Checkpoint, value: Any) -> AddedToken:
    """Convert a string or an object in a tokenizer's file to an AddedToken. Raises UserError for any other value."""
    given = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(given, dict) or not given.get("content") or not isinstance(given["content"], str):
        raise UserError(f"{checkpoint.folder / SETTINGS}: {str(value)[:80]!r} is not a token; {AGAIN}")
    return AddedToken(given["content"], **{name: flag is True for name, flag in given.items() if name in _FLAGS})

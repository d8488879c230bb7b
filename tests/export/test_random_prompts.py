"""Token ids of random conversations, with random tokenizers and chat templates, against transformers'.

``python tests/export/test_random_prompts.py SEED CHECKPOINTS`` tries that many seeds, from SEED on.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from prompts import MARKS, PLACES, folder_of, ours
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from edgevlm.errors import UserError
from edgevlm.export.families import load_family
from edgevlm.runtime.chat import Chat, encode_inside

CONVERSATIONS = 3  # with each checkpoint
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
WORDS = ["how", "many", "dogs", "two", "USER", "ASSISTANT"]
WORDS += ["12", "é", "e\u0301", "ﬁ", "İ", "中文", "🙂", "<0x0A>", *NAMED.values()]
SPACES = ["", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u200b", "▁", ".", "?", "'s", "<", ">"]
SPEAKERS = [  # text before a message's role, between it and the content, and after
    ("", ": ", " "), ("<|im_start|>", "\n", "<|im_end|>\n"), ("[INST] ", "", " [/INST]"), ("<|", "|>", "</s>"),
    ("", ":", "<end_of_utterance>\n"), ("<|im_start|>", " ", "<|im_end|>"),
]  # fmt: skip


def words(r: random.Random, most: int) -> str:
    return "".join(r.choice(WORDS if r.random() < 0.5 else SPACES) for _ in range(r.randint(1, most)))


def flags(r: random.Random) -> dict[str, bool]:
    return {name: r.random() < 0.2 for name in ("lstrip", "rstrip", "single_word", "normalized")}


def template(r: random.Random) -> str:
    before, between, after = r.choice(SPEAKERS)
    lead, behind = (r.choice(["", "", " ", "\n", f"Look{r.choice(SPACES)}"]) for _ in range(2))
    mark = r.choice(["{0}", f"{MARKS[0]}{{0}}{MARKS[1]}"]).format("<{{ item.type }}>")
    role = r.choice(["message.role", "message['role'] | upper", "message.role.capitalize()"])
    text = r.choice(["item.text", "item['text'] | trim"])
    start = r.choice(["", "", "{{ bos_token }}", "<s>", " "]) + r.choice(["", f"{before}system{between}You are good.{after}"])
    return (
        f"{start}{{% for message in messages %}}{before}{{{{ {role} }}}}{between}{{% for item in message.content %}}"
        f"{{% if item.type == 'text' %}}{{{{ {text} }}}}{{% else %}}{lead}{mark}{behind}{{% endif %}}{{% endfor %}}{after}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{before}ASSISTANT{between.rstrip(' ')}{{% endif %}}"
    )


def tokenizer(r: random.Random, joins: bool) -> Tokenizer:
    """A tokenizer of a random kind, trained on random text; ``joins``: one that may join text to a frame's."""
    kind = r.choice(["bytes", "llama", "llama", "wordpiece", "unigram"]) if joins else "bytes"
    alphabet = [*"abcdehinorstu?.:<>|▁ASUI"]
    if kind == "wordpiece":
        made, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer
    elif kind == "unigram":
        made, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer
    else:
        made, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer
    if kind == "bytes":
        alphabet, spaced = pre_tokenizers.ByteLevel.alphabet(), joins and r.random() < 0.5
        split = r.choice([[], [pre_tokenizers.Digits(individual_digits=True)]])
        parts = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=not joins or r.random() < 0.5)
        made.pre_tokenizer = pre_tokenizers.Sequence([*split, parts])
    elif kind == "wordpiece":
        made.pre_tokenizer = r.choice([pre_tokenizers.BertPreTokenizer, pre_tokenizers.Whitespace])()
    elif r.random() < 0.8:
        scheme = r.choice(["first", "always", "never"])
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "unigram" or r.random() < 0.5)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if made.normalizer is None:
        kinds = [normalizers.NFC, normalizers.NFKC, normalizers.Lowercase]
        kinds += [normalizers.Strip, normalizers.BertNormalizer] if joins else []
        made.normalizer = normalizers.Sequence([one() for one in r.sample(kinds, r.choice([0, 0, 1, 2]))])
    options = {"special_tokens": [*NAMED.values()], "initial_alphabet": alphabet, "show_progress": False}
    options |= {"unk_token": "<unk>"} if kind == "unigram" else {}
    made.train_from_iterator([words(r, 12) for _ in range(20)], trainer(vocab_size=len(alphabet) + 80, **options))
    if kind == "llama":  # bytes of letters that it does not have
        content = json.loads(made.to_str())
        vocabulary = content["model"]["vocab"]
        for byte in range(256):
            vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
        content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
        made = Tokenizer.from_str(json.dumps(content))
    named = [(word, made.token_to_id(word)) for word in ("<s>", "</s>")]
    around = r.choice(["<s> $A", "<s> $A </s>", "$A </s>"])
    adds = processors.TemplateProcessing(single=around, special_tokens=named)
    steps = [*r.choice([[], [processors.ByteLevel(trim_offsets=False)]]), *r.choice([[], [adds]])]
    if steps:
        made.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)
    if r.random() < 0.1:
        made.enable_truncation(8)
        made.enable_padding(length=64, pad_token=r.choice(["[PAD]", "</s>", "dogs"]))
    if r.random() < 0.3:
        made.add_tokens([AddedToken(r.choice(WORDS[:6]), special=r.random() < 0.5, **flags(r))])
    return made


def settings(r: random.Random, made: Tokenizer, place: str, joins: bool) -> dict[str, Any]:
    """What the files beside tokenizer.json name."""
    found: dict[str, Any] = {name: word for name, word in NAMED.items() if r.random() < 0.8}
    if r.random() < 0.3:
        found["pad_token"] = r.choice(["dogs", "</s>", "<|im_end|>"])
    if r.random() < 0.3:
        extra = r.sample([*WORDS[:6], "<|im_start|>", "<|im_end|>"], 2)
        found["extra_special_tokens" if r.random() < 0.7 else "additional_special_tokens"] = extra
    elif r.random() < 0.3:
        found["extra_special_tokens"] = {"first_token": "<|im_start|>", "other": r.choice(WORDS[:6])}
    known = made.get_vocab()
    others = [word for word in ("cats", *WORDS[:6], "<|im_end|>") if word not in known]
    added = [{"content": word, "special": r.random() < 0.5, **flags(r)} for word in r.sample(others, r.choice([0, 0, 1, 2]))]
    if added and r.random() < 0.3:  # other flags than tokenizer.json's
        found["added_tokens_decoder"] = [*added, {"content": r.choice([place, *NAMED.values()]), "special": True, **flags(r)}]
    elif added:
        found[r.choice(["added_tokens_decoder", "added_tokens"])] = added
    if r.random() < 0.2:
        found = {"special_tokens_map": {name: found.pop(name) for name in NAMED if name in found}, **found}
    classes = ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast"]
    found["tokenizer_class"] = r.choice(classes[: 1 if not isinstance(made.model, models.BPE) else 2 + joins])
    return found | {"legacy": r.random() < 0.5, "add_prefix_space": r.choice([None, False, joins])}


def check(seed: int, folder: Path) -> str:
    """Compare conversations of one checkpoint; return why it was refused, or an empty text."""
    from transformers import AutoTokenizer
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    r = random.Random(seed)
    name = r.choice([*PLACES])
    made = tokenizer(r, joins := name not in ("qwen3_vl", "smolvlm"))
    folder_of(folder, name, made, settings(r, made, PLACES[name], joins), template(r))
    theirs, family = AutoTokenizer.from_pretrained(folder), load_family(name, folder)
    if name == "smolvlm":  # as its processor does for a video
        theirs.chat_template = DEFAULT_CHAT_TEMPLATE
    try:
        spec, encoder = ours(folder, 2000)
    except UserError as error:
        return str(error).replace(str(folder), "")
    frames = [(family.before.format(seconds=n / 3, minutes=n // 60, second=n % 60), 2, family.after) for n in (0, 2000)]
    shown = family.opening + "".join(before + count * PLACES[name] + after for before, count, after in frames) + family.ending
    for _ in range(CONVERSATIONS):
        turns, question = [(words(r, 6), words(r, 6)) for _ in range(r.choice([0, 0, 1, 2]))], words(r, 10)
        chat = Chat(spec, encoder, r.choice([None, words(r, 6)]))
        said = [("system", chat.system), *(pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True))]
        said.append(("user", question))
        messages = [{"role": who, "content": [{"type": "text", "text": text}]} for who, text in said if text is not None]
        found = [token for before, count, after in frames for token in (
            *encode_inside(encoder, spec, before), *count * [spec.placeholder_id], *encode_inside(encoder, spec, after)
        )]  # fmt: skip
        for prompt in (chat.text_only(turns, question), [*chat.prefix, *found, *chat.suffix(turns, question)]):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            written = family.placeholder or PLACES[name]
            whole = written.join(family.around)
            text = text.replace(whole if whole in text else written, shown)
            special = theirs.bos_token is None or not text.startswith(theirs.bos_token)  # as processors do
            assert prompt == theirs(text, add_special_tokens=special).input_ids, f"seed {seed}, {name}: {text!r}"
            messages[chat.system is not None]["content"].insert(0, {"type": family.content_type})
    return ""


def test_random_prompts_are_the_tokens_of_transformers(tmp_path: Path) -> None:
    refused = [check(seed, tmp_path / str(seed)) for seed in range(50)]
    assert refused.count("") > 40


if __name__ == "__main__":
    start, number = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as made_folder:
        outcomes = Counter(check(seed, Path(made_folder) / str(seed)) for seed in range(start, start + number))
    print(f"{CONVERSATIONS * outcomes.pop('')} conversations of {number} checkpoints are equal; refused: {dict(outcomes)}")

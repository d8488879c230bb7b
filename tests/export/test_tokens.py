"""Prompts' token ids and answers against transformers', for tokenizers and generation settings as checkpoints publish them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf import Video, load
from prompts import PLACES, folder_of, ours
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from edgevlm.errors import UserError
from edgevlm.export.chat import chat
from edgevlm.export.checkpoint import ConfigOnly
from edgevlm.export.families import load_family
from edgevlm.runtime.bundle import ChatSpec
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.session import Session

TURNS, QUESTION = [("how many dogs  are there?", " two.\n")], " and cats?"
VICUNA = (
    "{% for message in messages %}{{ message.role.upper() }}: {% for item in message.content %}"
    "{% if item.type == 'text' %}{{ item.text }}{% else %}{{ '<' ~ item.type ~ '>\n' }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ENVIRONMENT = VICUNA.replace("{{ item.text }}", "{% generation %}{{ item.text|tojson }}{% endgeneration %}")
ENVIRONMENT += "{{ strftime_now('%d') }}{{ tools is none }}"


def llama(**parts: Any) -> Tokenizer:
    """A tokenizer like Llama's: bytes, a blank before words, `<s>` before a text."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzASITNU:?.<>"]
    merges = [("▁", "a"), ("▁", "A"), ("▁", "d"), ("o", "g"), ("▁d", "og"), ("▁", "▁"), ("r", "e"), ("▁a", "re"), ("▁", "t")]
    vocabulary = {word: number for number, word in enumerate([*words, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def legacy() -> Tokenizer:
    """As Llama's was saved before: every piece between added tokens gets a blank."""
    blanks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return llama(normalizer=blanks, pre_tokenizer=None)


def qwen() -> Tokenizer:
    """Bytes, split in another way than Qwen's."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE({**alphabet, "Ċ<": 256, "?<": 257}, [("Ċ", "<"), ("?", "<")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False), decoders.ByteLevel()
    return made


def cut(made: Tokenizer) -> Tokenizer:
    made.enable_truncation(8)
    made.enable_padding(length=64, pad_id=2, pad_token="</s>")
    return made


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
OTHERS = [{"content": "cats", "special": False, "normalized": True}, {"content": "ASSISTANT", "special": True}]
CASES: dict[str, tuple[str, Tokenizer, dict[str, Any], str]] = {
    "bos": ("llava", llama(), NAMED, VICUNA),
    "bos written": ("llava", llama(), NAMED, "{{ bos_token }}" + VICUNA),
    "bos unnamed": ("llava", llama(), {}, "<s>" + VICUNA),
    "legacy": ("llava", legacy(), NAMED | {"tokenizer_class": "LlamaTokenizer", "legacy": True}, VICUNA),
    "rebuilt": ("llava_next_video", legacy(), NAMED | {"tokenizer_class": "LlamaTokenizer"}, VICUNA),
    "rebuilt legacy": ("llava_next_video", llama(), {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, VICUNA),
    "cut and padded": ("llava_onevision", cut(llama()), NAMED | {"pad_token": "</s>"}, VICUNA),
    "rebuilt Qwen": ("qwen2_vl", qwen(), {}, VICUNA),
    "saved Qwen": ("qwen2_vl", qwen(), {"tokenizer_class": "PreTrainedTokenizerFast"}, VICUNA),
    "special in config": ("llava", llama(), NAMED | {"extra_special_tokens": ["cats", "USER"], "pad_token": "dogs"}, VICUNA),
    "special by name": ("llava", llama(), {"extra_special_tokens": {"x": "cats", "a_token": "TANT"}, **NAMED}, VICUNA),
    "added in config": ("llava", llama(), NAMED | {"added_tokens_decoder": OTHERS}, VICUNA),
    "added_tokens.json": ("llava_next_video", llama(), NAMED | {"added_tokens": OTHERS}, VICUNA),
    "environment": ("llava", llama(), NAMED, ENVIRONMENT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_the_tokens_of_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoTokenizer

    family = CASES[case][0]
    folder = folder_of(tmp_path / "checkpoint", *CASES[case])
    theirs, (spec, tokenizer) = AutoTokenizer.from_pretrained(folder), ours(folder)
    made = Chat(spec, tokenizer)
    messages: list[dict[str, Any]] = []
    for asked, answered in [*TURNS, (QUESTION, None)]:
        content = [{"type": PLACES[family][1:-1]}] if not messages else []
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": asked}]})
        messages += [{"role": "assistant", "content": [{"type": "text", "text": answered}]}] if answered else []
    for video in (True, False):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        special = theirs.bos_token is None or not text.startswith(theirs.bos_token)  # as processors do
        wanted = theirs(text.replace(PLACES[family], 3 * PLACES[family]), add_special_tokens=special).input_ids
        found = (
            [*made.prefix, *[spec.placeholder_id] * 3, *made.suffix(TURNS, QUESTION)]
            if video
            else made.text_only(TURNS, QUESTION)
        )
        assert found == wanted
        messages[0]["content"] = messages[0]["content"][1:]


def test_a_processor_of_transformers_makes_the_same_prompt(tmp_path: Path) -> None:
    """LLaVA's own ``apply_chat_template(tokenize=True)``, which adds `<s>`."""
    from transformers import AutoTokenizer, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder = folder_of(tmp_path / "checkpoint", *CASES["bos"])
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    theirs = AutoTokenizer.from_pretrained(folder)
    processor = LlavaProcessor(pictures, theirs, patch_size=14, chat_template=theirs.chat_template)
    picture = {"type": "image", "image": np.zeros((28, 28, 3), np.uint8)}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]
    wanted = processor.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
    spec, tokenizer = ours(folder)
    made = Chat(spec, tokenizer)
    assert [*made.prefix, *[spec.placeholder_id] * 4, *made.suffix([], QUESTION)] == np.asarray(wanted).ravel().tolist()
    assert made.prefix[0] == tokenizer.token_to_id("<s>")


GENERATION: list[tuple[dict[str, Any], dict[str, Any]]] = [  # generation_config.json, and a user's own settings
    ({"repetition_penalty": 1.3}, {}),
    ({"repetition_penalty": 0.7, "do_sample": True, "temperature": 0.1}, {}),
    ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}, {}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.0}),
    ({"eos_token_id": [None]}, {}),  # its fourth token
]


SAMPLED = {"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643]}
CONFIGURED = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 32001, "use_cache": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "smolvlm": CONFIGURED | {"eos_token_id": 49279, "pad_token_id": 2},
    "llava": CONFIGURED,
    "llava_next_video": CONFIGURED,
    "llava_onevision": SAMPLED | {"repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "qwen2_vl": SAMPLED | {"repetition_penalty": 1.0, "temperature": 0.01, "top_k": 1, "top_p": 0.001},
    "qwen2_5_vl": SAMPLED | {"repetition_penalty": 1.05, "temperature": 1e-06},
    "qwen3_vl": SAMPLED | {"repetition_penalty": 1.0, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
}
DEFAULTS = {  # as transformers 4 writes all of them
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "length_penalty": 1.0, "early_stopping": False,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0, "token_healing": False, "num_return_sequences": 1, "output_scores": False,
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "forced_eos_token_id", "guidance_scale", "dola_layers")),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("more", [{}, DEFAULTS, {"repetition_penalty": None}, {"repetition_penalty": 1}])
def test_generation_config_as_families_publish_it(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    settings = PUBLISHED[family] | {"transformers_version": "4.57.0"} | more
    folder = folder_of(tmp_path / "checkpoint", family, llama(), NAMED, VICUNA)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    theirs, (spec, _) = GenerationConfig.from_pretrained(folder), ours(folder, 152128)
    assert spec.stop_ids == (theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id])
    assert (spec.repetition_penalty or 1) == (theirs.repetition_penalty or 1)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_greedy_answers_follow_generation_config(exported: Any, tmp_path: Path, family: str) -> None:
    """As ``generate`` does, for a video whose time passes its grid and for text alone."""
    made = exported(family, positions="transformers")
    folder = Path(shutil.copytree(made.checkpoint, tmp_path / "checkpoint"))
    oracle, family_of = load(folder, family), load_family(family, folder)
    seen: set[tuple[int, ...]] = set()
    with closing(Model.load(made.bundle, threads=1)) as model:
        images = np.random.default_rng(0).integers(0, 256, (20, *model.bundle.vision.size, 3), np.uint8)
        pixels = np.stack([Preprocessor(model.bundle.vision)(image) for image in images])
        usual: list[int] = []
        for settings, own in GENERATION:
            if family_of.before and settings.get("no_repeat_ngram_size"):
                continue
            if settings.get("eos_token_id"):
                settings = {"eos_token_id": usual[3:4]}
            (folder / "generation_config.json").write_text(json.dumps(settings))
            spec = ChatSpec(**chat(ConfigOnly(folder), family_of, model.bundle.decoder.vocab)[0])
            model.bundle = replace(model.bundle, chat=spec)
            made_chat = Chat(spec, model.tokenizer)
            for watched in (True, False)[: 2 if family == "llava_onevision" else 1]:
                prefix, suffix = made_chat.prefix, made_chat.suffix([], "what color was the square?")
                video = Video(oracle, family, model.encode, pixels, 1.0, prefix, suffix)
                given, ids = dict(video.given), torch.tensor([video.ids])
                if "qwen" in family:
                    given["mm_token_type_ids"] = (ids == video.place).int() * 2
                if family == "qwen2_5_vl":
                    given["second_per_grid_ts"] = torch.tensor([2.0])
                if not watched:
                    given, ids = {}, torch.tensor([made_chat.text_only([], "what color was the square?")])
                options = {"eos_token_id": oracle.config.text_config.eos_token_id, **settings, "do_sample": False, **own}
                found = oracle.generate(input_ids=ids, **given, max_new_tokens=12, **options)[0, ids.shape[1] :].tolist()
                with Session.open(model, append="all", policy="full", budget="1k", chunk=4) as session:
                    for index, image in enumerate(images if watched else ()):
                        session.watch(image, float(index))
                    answer = session.ask("what color was the square?", max_tokens=12, **own)
                    assert answer.wait(60)
                assert answer.token_ids == [token for token in found if token not in spec.stop_ids]
                seen.add(tuple(answer.token_ids))
                usual = usual or answer.token_ids
    assert len(seen) > 2, "the settings change answers"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("generation_config.json", {"num_beams": 4}, "num_beams = 4 is not supported"),
        ("generation_config.json", {"eos_token_id": -1}, r"generation_config.json: .*eos_token_id: Input should be"),
        ("generation_config.json", {"eos_token_id": [2, -1]}, r"\(eos_token_id\.1: Input should be greater"),
        ("generation_config.json", {"eos_token_id": [2, 400]}, "stop tokens must be .* not .2, 400."),
        ("added_tokens.json", {"cats": 390}, "added_tokens.json: token 'cats' has id 390"),
        ("added_tokens.json", {"cats": [390]}, "added_tokens.json: does not map ids to tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": "cats"}}, "'cats' has id 9"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens splits"),
        ("tokenizer_config.json", {"pad_token": "<pad>"}, "token '<pad>' has id"),
        ("tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer"}, "tokenizer_class 'GemmaTokenizer' is not supported"),
        ("chat_template.jinja", "{% for m in messages %}{{ m.content[-1].text }}<video>{% endfor %}", "question before"),
        ("tokenizer.json", 399, "'zebra' has id 399"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path: Path, name: str, content: Any, says: str) -> None:
    folder = folder_of(tmp_path / "checkpoint", "llava_next_video", llama(), NAMED, VICUNA)
    if name == "tokenizer.json":  # a number that leaves a hole
        saved = json.loads((folder / name).read_text())
        saved["model"]["vocab"]["zebra"], content = content, saved
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=says):
        ours(folder, 399 if name != "tokenizer_config.json" else llama().get_vocab_size() + 1)

"""Convert a language model's GGUF file to a bundle for questions about text."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgevlm import __version__
from edgevlm.bench.seeded import decoder_bundle
from edgevlm.errors import UserError
from edgevlm.export.backbones import text_backbone
from edgevlm.export.gguf import GgufCheckpoint
from edgevlm.runtime.bundle import FORMAT, MANIFEST, ChatSpec, hash_file, seal_manifest

TOKENIZER = "tokenizer.json"
CONTROL = 3  # tokenizer.ggml.token_type of a special token
STREAM = "<stream>"
TEMPLATE = (
    "{% for item in messages[-1]['content'] %}{% if item['type'] == 'video' %}<|im_start|>user\n" + STREAM + "\n"
    "{% else %}{% set question, _, start = item['text'].partition('\n') %}{{ question }}<|im_end|>\n"
    "<|im_start|>assistant\n{{ start }}{% endif %}{% endfor %}"
)


def text_bundle(gguf: Path, folder: Path, precision: str = "int8") -> Path:
    """Convert a GGUF file to a bundle in ``folder`` and return the folder.

    The bundle has a stand-in for the vision tower. Its chat template lets a question's text also contain the first words of the
    answer. Raises UserError if the file is damaged or its architecture or tokenizer is not supported here.
    """
    checkpoint = GgufCheckpoint(gguf)
    tokenizer = _tokenizer(checkpoint)
    vocabulary = tokenizer.get_vocab()
    if not {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= vocabulary.keys():
        raise UserError(f"{gguf}: its tokenizer has no ChatML tokens; use a model tuned for ChatML, such as SmolLM2-Instruct")
    config = checkpoint.section("text_config")
    shape = text_backbone(config["model_type"]).shape(config, checkpoint.tied)
    made = decoder_bundle(folder, shape, tensors=checkpoint, backbone=config["model_type"], precision=precision)
    tokenizer.save(str(folder / TOKENIZER))
    chat = ChatSpec(TOKENIZER, TEMPLATE, "video", STREAM, -1, {}, (vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]))
    made = replace(made, edgevlm=__version__, family="text", source=gguf.name, chat=chat)
    files = {path.name: asdict(hash_file(path)) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    sections = {name: asdict(getattr(made, name)) for name in ("decoder", "vision", "chat")}
    head = {"format": FORMAT, "edgevlm": made.edgevlm, "family": made.family, "source": made.source, "profile": made.profile}
    (folder / MANIFEST).write_bytes(seal_manifest({**head, **sections, "files": files}))
    return folder


def _tokenizer(checkpoint: GgufCheckpoint) -> Tokenizer:
    """Return the checkpoint's tokenizer. Raises UserError if the tokenizer is not SmolLM's."""
    kind = checkpoint.field("tokenizer.ggml.pre")
    if kind != "smollm":
        raise UserError(f"{checkpoint.folder}: tokenizer {kind!r} is not supported, only 'smollm'; use a SmolLM2 file")
    tokens = checkpoint.field("tokenizer.ggml.tokens")
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in checkpoint.field("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    types = checkpoint.field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([token for token, of in zip(tokens, types, strict=True) if of == CONTROL])
    return tokenizer

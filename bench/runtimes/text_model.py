"""The text half of a model, as all runtimes of a bench take it: a shape and where its tensors come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgevlm.bench.seeded import SeededTensors, Tensors, llava_onevision_05b
from edgevlm.export.backbones import TEXT_BACKBONES, DecoderShape, text_backbone
from edgevlm.export.checkpoint import Checkpoint, with_defaults


@dataclass(frozen=True, slots=True)
class TextModel:
    """``backbone``: llama, qwen2 or qwen3."""

    name: str
    backbone: str
    shape: DecoderShape
    tensors: Tensors

    @property
    def head(self) -> str:
        """The canonical name of the matrix that scores the vocabulary."""
        return "text.embed_tokens.weight" if self.shape.tied else "text.lm_head.weight"


def smollm2_135m() -> DecoderShape:
    """The shape of SmolLM2-135M, which is also SmolVLM-256M's decoder's."""
    return DecoderShape(
        layers=30, heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocab=49152, norm_eps=1e-5, rope_theta=1e5,
        model_limit=8192, tied=True,
    )  # fmt: skip


def demo() -> DecoderShape:
    """The demo model's shape."""
    return DecoderShape(
        layers=4, heads=4, kv_heads=2, head_dim=64, hidden=128, intermediate=384, vocab=66, norm_eps=1e-6, rope_theta=1e6,
        model_limit=4096, tied=True,
    )  # fmt: skip


def qwen2_5_vl_3b() -> DecoderShape:
    """The shape of Qwen2.5-VL-3B's decoder."""
    return DecoderShape(
        layers=36, heads=16, kv_heads=2, head_dim=128, hidden=2048, intermediate=11008, vocab=151936, norm_eps=1e-6,
        rope_theta=1e6, model_limit=32768, tied=True,
    )  # fmt: skip


SEEDED = {
    "seeded-135m": ("llama", smollm2_135m),
    "seeded-0.5b": ("qwen2", llava_onevision_05b),
    "seeded-3b": ("qwen2", qwen2_5_vl_3b),
    "demo": ("qwen2", demo),
}


def open_text_model(name: str, layers: int | None = None) -> TextModel:
    """One of SEEDED, which has random weights, or the text half of the checkpoint in the folder ``name``.

    Checkpoints of text alone are read too. layers: its first so many alone, where that is less. Raises UserError for what is
    neither.
    """
    whole = _open(name)
    shape = whole.shape
    return whole if layers is None else replace(whole, shape=replace(shape, layers=min(layers, shape.layers)))


def _open(name: str) -> TextModel:
    if name in SEEDED:
        backbone, shape = SEEDED[name]
        return TextModel(name, backbone, shape(), SeededTensors(0))
    checkpoint = Checkpoint(name)
    text: dict[str, Any] = dict(checkpoint.section("text_config"))
    if str(text.get("model_type")) not in TEXT_BACKBONES:  # a checkpoint of text alone, whose section is all of it
        text["model_type"] = str(text.get("model_type")).removesuffix("_text")
    text = with_defaults(text)
    kind = str(text["model_type"])
    tied = bool(checkpoint.config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    shape_of = text_backbone(kind).shape(text, tied)
    return TextModel(Path(name).name, TEXT_BACKBONES[kind].rpartition(".")[2], shape_of, checkpoint)

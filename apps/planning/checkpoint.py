"""A checkpoint as a plan sees it: ``config.json``, and the processor's settings where they are there. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgevlm.apps.planning.shape import PlannedModel, layer_matrices
from edgevlm.apps.planning.towers import FrameSize, tower
from edgevlm.errors import UserError
from edgevlm.export import FAMILIES
from edgevlm.export.backbones import DecoderShape, text_backbone
from edgevlm.export.checkpoint import Checkpoint, ConfigOnly, nearest
from edgevlm.export.defaults import with_defaults
from edgevlm.export.prequantised import PREQUANTISED, prequantised
from edgevlm.export.qwen_sizes import fitted, frame_size

PREFIX = 32  # rows allowed for the system prompt, which needs the tokenizer to be counted
PROCESSORS = ("video_processor", "image_processor")
PROCESSOR_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")


def plan_checkpoint(folder: Path, camera: tuple[int, int]) -> PlannedModel:
    """The model in a checkpoint's folder, for frames of ``camera``, (height, width), pixels.

    Raises UserError, one line, for what :mod:`edgevlm.export` would refuse in ``config.json``.
    """
    checkpoint = ConfigOnly(folder)
    packing = prequantised(checkpoint.config)
    where, family = checkpoint.folder / "config.json", str(checkpoint.config.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"{where}: model type {family!r} cannot be exported; {nearest(family, FAMILIES)}")
    try:
        model = planned(checkpoint.name, _filled(checkpoint, family), partial(_frame_size, checkpoint, camera))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: cannot be understood ({error!r})") from None
    return model if packing is None else replace(model, precision=PREQUANTISED, group=packing.group)


def planned(name: str, config: Mapping[str, Any], sized: FrameSize) -> PlannedModel:
    """The model of a whole ``config.json``, nothing left out. Raises KeyError, TypeError or ValueError for what is none."""
    text, vision, family = config["text_config"], config["vision_config"], str(config["model_type"])
    backbone = str(text["model_type"])
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    shape = text_backbone(backbone).shape(text, tied)
    limit = int(config.get("edgevlm_trained_length", text.get("edgevlm_trained_length", shape.model_limit)))
    sizes = (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate)
    norms = 2 * shape.hidden + 2 * shape.head_dim * shape.head_norms
    return PlannedModel(
        name=name, family=family, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        hidden=shape.hidden, inner=shape.intermediate, vocab=shape.vocab, matrices=shape.layers * layer_matrices(*sizes),
        vectors=shape.layers * (norms + _biases(shape, backbone)) + shape.hidden, tied=tied,
        axes=1 if shape.sections is None else 3, limit=min(limit, shape.model_limit), tower=tower(family, config, sized),
        prefix=PREFIX, closing=int(family == "llava_onevision"), deepstack=len(vision.get("deepstack_visual_indexes", ())),
    )  # fmt: skip


def _biases(shape: DecoderShape, backbone: str) -> int:
    """Numbers of a layer's biases: those that ``text_config`` asks for, and Qwen2's own of q, k and v."""
    widths = {
        "q": shape.heads * shape.head_dim, "k": shape.kv_size, "v": shape.kv_size, "o": shape.hidden,
        "gate": shape.intermediate, "up": shape.intermediate, "down": shape.hidden,
    }  # fmt: skip
    parts = {*shape.biases, *(("q", "k", "v") if backbone.startswith("qwen2") else ())}
    return sum(widths[part] for part in parts)


def _filled(checkpoint: Checkpoint, family: str) -> dict[str, Any]:
    """The whole configuration with transformers' defaults for what it and its sections leave out."""
    towers = {"qwen2_vl": "qwen2_vl_vision", "qwen2_5_vl": "qwen2_5_vl_vision", "qwen3_vl": "qwen3_vl_vision"}
    kind = towers.get(family, "smolvlm_vision" if family == "smolvlm" else "")
    config = with_defaults(checkpoint.config)
    return config | {
        "text_config": with_defaults(checkpoint.section("text_config")),
        "vision_config": with_defaults(checkpoint.section("vision_config"), kind),
    }


def _frame_size(
    checkpoint: Checkpoint, camera: tuple[int, int], factor: int, budget: tuple[int, int], clip: int
) -> tuple[int, int]:
    """As the exporter sizes a frame, by the family's own pixel budget where the folder has no processor file."""
    if any((checkpoint.folder / name).exists() for name in PROCESSOR_FILES):
        return frame_size(checkpoint, PROCESSORS, camera, factor, budget, clip)
    return fitted(*camera, factor, budget[0], budget[1] * clip, clip)

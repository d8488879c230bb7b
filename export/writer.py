"""One export from start to end: read the checkpoint, write graphs and files, describe them, publish the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.engines.base import KVType
from edgevlm.errors import UserError
from edgevlm.export import decoder, vision
from edgevlm.export import kv as kv_memory
from edgevlm.export.backbones import Backbone, DecoderShape, text_backbone
from edgevlm.export.chat import chat
from edgevlm.export.checkpoint import Checkpoint, nearest
from edgevlm.export.defaults import with_defaults
from edgevlm.export.family import FamilyParts
from edgevlm.export.frames import frame_preparation
from edgevlm.export.graph import save_array
from edgevlm.runtime.bundle import FORMAT, MANIFEST, Bundle, Progress, hash_file, seal_manifest
from edgevlm.runtime.publish import check_target, published

CLOSING = "closing.npy"
CAMERA = (480, 640)


def write_bundle(
    source: Path,
    out_dir: Path,
    families: Mapping[str, str],
    progress: Progress,
    force: bool,
    st_spattn_from: int | None = None,
    camera: tuple[int, int] = CAMERA,
    kv: KVType = "fp32",
) -> Path:
    """See :func:`edgevlm.export.export_checkpoint`."""
    checkpoint = Checkpoint(source)
    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in families:
        where = checkpoint.folder / "config.json"
        raise UserError(f"{where}: model type {model_type!r} cannot be exported; {nearest(model_type, families)}")
    backbone, shape = _decoder_shape(checkpoint)
    decoder.first_sparse_layer(shape, st_spattn_from)
    check_target(out_dir, force)
    progress("reading the vision tower")
    parts = _family_parts(checkpoint, families[model_type], camera)
    shape = _with_parts(shape, parts)
    talk, tokenizer = chat(checkpoint, parts, shape.vocab)
    frames = frame_preparation(checkpoint, parts.processors, parts.vision.size, is_sized=parts.is_sized)
    if parts.longest_edge is not None:
        frames["fit"] = "longest"
    with published(out_dir, force=force) as folder:
        progress("tracing the vision tower")
        tokens, _ = vision.write_vision(parts.vision, folder)
        sparse = not (parts.before or parts.after)
        graphs = decoder.write_decoder(checkpoint, backbone, shape, folder, progress, st_spattn_from, sparse, kv)
        (folder / talk["tokenizer"]).write_text(tokenizer, encoding="utf-8")
        if parts.closing is not None:
            save_array(folder / CLOSING, parts.closing)
        progress("hashing")
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "edgevlm": __version__,
            "family": model_type,
            "source": checkpoint.name,
            "decoder": {**_decoder_section(checkpoint, shape, graphs), "kv": kv},
            "vision": {
                "graph": vision.GRAPH,
                **frames,
                "tokens_per_frame": tokens,
                "grid": list(parts.grid),
                "closing": None if parts.closing is None else CLOSING,
                "group": parts.vision.group,
                "positions": parts.positions,
                "tokens_per_second": parts.tokens_per_second,
                "longest_edge": parts.longest_edge,
                "before": parts.before,
                "after": parts.after,
            },
            "chat": talk,
            "files": {path.name: _record(path) for path in sorted(folder.iterdir())},
        }
        if kv == "int8":
            kv_memory.add_scales(folder, manifest, progress)
        (folder / MANIFEST).write_bytes(seal_manifest(manifest))
        Bundle.load(folder, verify="size")
    return out_dir


def _family_parts(checkpoint: Checkpoint, module: str, camera: tuple[int, int]) -> FamilyParts:
    try:
        parts: FamilyParts = import_module(module).parts(checkpoint, camera)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.folder / 'config.json'}: cannot be understood ({error!r})") from None
    return parts


def _with_parts(shape: DecoderShape, parts: FamilyParts) -> DecoderShape:
    """The decoder with what the tower gives it; raises UserError if one has positions of rows and columns and the other not."""
    if (shape.sections is None) != (parts.positions == "rows"):
        raise UserError(f"config.json: mrope_section is {shape.sections} and frames take positions by {parts.positions!r}")
    if parts.deepstack > shape.layers:
        raise UserError(f"config.json: {parts.deepstack} deepstack_visual_indexes and only {shape.layers} decoder layers")
    return replace(shape, deepstack=parts.deepstack)


def _decoder_shape(checkpoint: Checkpoint) -> tuple[Backbone, DecoderShape]:
    text = with_defaults(checkpoint.section("text_config"))
    backbone = text_backbone(str(text.get("model_type")))
    tied = bool(checkpoint.config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    try:
        return backbone, backbone.shape(text, tied)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.folder / 'config.json'}: text_config is incomplete ({error!r})") from None


def _decoder_section(checkpoint: Checkpoint, shape: DecoderShape, graphs: dict[str, str]) -> dict[str, Any]:
    text = checkpoint.section("text_config")
    trained = checkpoint.config.get("edgevlm_trained_length", text.get("edgevlm_trained_length", shape.model_limit))
    return {
        "backbone": text["model_type"],
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "rope_theta": shape.rope_theta,
        "inv_freq": shape.inv_freq(),
        "model_limit": shape.model_limit,
        "trained_length": int(trained),
        "graphs": graphs,
        "embedding": decoder.EMBEDDING,
        "rope_sections": None if shape.sections is None else list(shape.sections),
        "rope_interleaved": shape.interleaved,
        "deepstack": shape.deepstack,
    }


def _record(path: Path) -> dict[str, Any]:
    record = hash_file(path)
    return {"bytes": record.bytes, "sha256": record.sha256}

"""One export from start to end: read the checkpoint, write graphs and files, describe them, commit the directory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.export import decoder, vision
from edgevlm.export.backbones import Backbone, DecoderShape, text_backbone
from edgevlm.export.chat import chat
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.families import Family, FamilyParts, load_family
from edgevlm.export.fingerprint import fingerprint
from edgevlm.export.frames import frame_preparation
from edgevlm.export.gguf import text_tensors
from edgevlm.export.graph import ExportJournal, save_array
from edgevlm.export.kv_scales import add_scales, check_scales
from edgevlm.export.memory import bundle_bytes, check_disk, check_memory, layer_bytes
from edgevlm.export.prequantised import PREQUANTISED, check_no_zero_points, prequantised, stored_in
from edgevlm.export.profiles import Profile, load_profile
from edgevlm.export.samples import ActivationSampler, Samples, rounded_layout
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import FORMAT, MANIFEST, Bundle, check_target, hash_file, seal_manifest
from edgevlm.runtime.files import atomic_directory, journal_of
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, vision_precision
from edgevlm.runtime.kv import KVType
from edgevlm.runtime.positions import position_rule

CLOSING = "closing.npy"
CHUNK = 8  # frames, as a session encodes at once
QUESTION = 512  # tokens of a conversation and a question
FRAME_TEXT = 32  # tokens of the text around a frame, at the most


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of a bundle; see :func:`edgevlm.export.export_checkpoint`."""

    st_spattn_from: int | None
    camera: tuple[int, int]
    text_gguf: Path | None
    precision: str | None
    samples: Samples | ActivationSampler | None
    vision_precision: str | None
    kv: KVType
    profile: str
    positions: str

    def facts(self) -> dict[str, Any]:
        """All of them, for a fingerprint."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return facts | {"samples": self.samples.source if isinstance(self.samples, ActivationSampler) else self.samples or {}}

    def sampled(self, folder: Path) -> Samples | None:
        """The samples, made in the work folder ``folder`` where they are not there."""
        return self.samples.sample(folder) if isinstance(self.samples, ActivationSampler) else self.samples


def write_bundle(
    source: Path,
    out_dir: Path,
    options: Options,
    progress: Notify,
    notify: Notify,
    *,
    force: bool,
) -> Path:
    """See :func:`edgevlm.export.export_checkpoint`."""
    checkpoint, profile = Checkpoint(source), load_profile(options.profile)
    profile.check_kv(options.kv)
    precision = _precision(checkpoint, options.precision, options.samples, profile, options.text_gguf)
    options = replace(
        options, precision=precision, vision_precision=vision_precision(profile.name, options.vision_precision, precision)
    )
    model = _read(checkpoint, options, lambda: check_target(out_dir, force), progress)
    check_memory(source, layer_bytes(model.shape))
    key = fingerprint(source, options.facts())
    with atomic_directory(out_dir, partial(check_target, force=force), key=key, notify=notify) as folder:
        check_disk(out_dir, folder, bundle_bytes(model.shape, model.tower_parameters, profile.precision(precision)))
        samples = options.sampled(folder.parent)
        with ExportJournal(journal_of(folder)) as journal:
            _write(model, folder, journal, progress, precision, samples)
    return out_dir


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint understood, its weights not read yet."""

    checkpoint: Checkpoint
    options: Options
    name: str
    family: Family
    backbone: Backbone
    shape: DecoderShape
    parts: FamilyParts
    tower_parameters: int
    chat: dict[str, Any]
    tokenizer: str
    frames: dict[str, Any]


def _read(checkpoint: Checkpoint, options: Options, check_out: Callable[[], None], progress: Notify) -> ModelSource:
    """Everything that can be refused before a byte is written, the cheapest first."""
    model_type = str(checkpoint.config.get("model_type"))
    family = load_family(model_type, checkpoint.folder / "config.json")
    backbone, shape = decoder_shape(checkpoint)
    decoder.first_sparse_layer(shape, options.st_spattn_from)
    check_out()
    progress("reading the vision tower")
    if options.text_gguf is not None:
        checkpoint.take_text(text_tensors(options.text_gguf, checkpoint.section("text_config")))
    parts = family_parts(checkpoint, family, options.camera)
    tower_parameters = vision.count_parameters(parts.vision, checkpoint)
    shape = _with_parts(shape, family, parts)
    talk, tokenizer = chat(checkpoint, family, shape.vocab)
    frames = frame_preparation(checkpoint, family.processors, parts.vision.size, is_sized=family.is_sized)
    if parts.longest_edge is not None:
        frames["fit"] = "longest"
    frames["precision"] = options.vision_precision
    if options.kv == "int8":
        limit = min(shape.model_limit, _trained_length(checkpoint, shape))
        closing = 0 if parts.closing is None else len(parts.closing)
        check_scales(limit, math.prod(parts.grid), (family.before, family.after), closing, talk, tokenizer)
    return ModelSource(
        checkpoint, options, model_type, family, backbone, shape, parts, tower_parameters, talk, tokenizer, frames
    )


def _write(
    model: ModelSource, folder: Path, journal: ExportJournal, progress: Notify, precision: str, samples: Samples | None
) -> None:
    """The files of the bundle, but for what ``journal`` has."""
    checkpoint, parts, shape, options = model.checkpoint, model.parts, model.shape, model.options
    progress("writing the vision tower")
    profile, tokens = load_profile(options.profile), math.prod(parts.grid)
    precision_of, standard = model.frames["precision"], profile.is_tensorrt
    write = partial(vision.write_vision, parts.vision, checkpoint, folder, precision_of, standard, changed=not standard)
    changed = journal.once(vision.GRAPH, write)
    sparse = not (model.family.before or model.family.after)
    made = decoder.write_decoder(
        checkpoint, model.backbone, shape, folder, progress, options.st_spattn_from, sparse, precision, samples,
        journal, options.kv, profile.name,
    )  # fmt: skip
    profile.check_operators([folder / name for name in (vision.GRAPH, *made.graphs.values())])
    (folder / model.chat["tokenizer"]).write_text(model.tokenizer, encoding="utf-8")
    if parts.closing is not None:
        save_array(folder / CLOSING, parts.closing)
    progress("hashing")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "edgevlm": __version__,
        "family": model.name,
        "source": checkpoint.source,
        "profile": profile.name,
        "decoder": _decoder_section(checkpoint, model.family, shape, made)
        | {"precision": precision, "rounding": "nearest" if samples is None else "gptq", "kv": options.kv},
        "vision": _vision_section(model, tokens) | {"changed": changed},
        "chat": model.chat,
        "files": {path.name: _record(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST},
    }
    if profile.is_tensorrt:
        manifest["shapes"] = _engine_shapes(model, tokens)
    if options.kv == "int8":
        add_scales(folder, manifest, progress)
    (folder / MANIFEST).write_bytes(seal_manifest(manifest))
    Bundle.load(folder, verify="size")


def _vision_section(model: ModelSource, tokens: int) -> dict[str, Any]:
    parts, family = model.parts, model.family
    return {
        "graph": vision.GRAPH,
        **model.frames,
        "tokens_per_frame": tokens,
        "grid": list(parts.grid),
        "closing": None if parts.closing is None else CLOSING,
        "group": parts.vision.group,
        "positions": position_rule(family.positions, model.options.positions),
        "tokens_per_second": parts.tokens_per_second,
        "longest_edge": parts.longest_edge,
        "before": family.before,
        "after": family.after,
        "pixels": None if parts.pixels is None or model.options.profile != ONNXRUNTIME else asdict(parts.pixels),
    }


def _engine_shapes(model: ModelSource, tokens: int) -> dict[str, int]:
    """See :class:`edgevlm.runtime.graph_profiles.EngineShapes`: a run's usual chunk, conversation and question."""
    text, group = FRAME_TEXT if model.family.before or model.family.after else 0, model.parts.vision.group
    frames = -(-CHUNK // group) * group
    return {"frames": frames, "rows": frames // group * (tokens + text), "question": QUESTION}


def _precision(
    checkpoint: Checkpoint,
    wanted: str | None,
    samples: Samples | ActivationSampler | None,
    profile: Profile,
    text_gguf: Path | None,
) -> str:
    """The precision to store matrices in: the one wanted, or the checkpoint's own. Raises UserError for one that cannot be."""
    packing = None if text_gguf is not None else prequantised(checkpoint.config)
    chosen = stored_in(checkpoint.config, text_gguf, wanted)
    if packing is not None and profile.is_tensorrt:
        check_no_zero_points(checkpoint.config, checkpoint.folder)
    profile.precision(chosen)
    if samples is not None:
        rounded_layout(chosen, profile.name)
    if packing is not None and (chosen != PREQUANTISED or samples is not None):
        where = checkpoint.folder / "config.json"
        raise UserError(
            f"{where}: {packing.method} has rounded the checkpoint to 4 bits already; leave --precision and --rounding out"
        )
    return chosen


def family_parts(checkpoint: Checkpoint, family: Family, camera: tuple[int, int]) -> FamilyParts:
    """What a family makes of a checkpoint; raises UserError, one line, for a configuration that it does not understand."""
    try:
        return family.parts(checkpoint, camera)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.folder / 'config.json'}: cannot be understood ({error!r})") from None


def _with_parts(shape: DecoderShape, family: Family, parts: FamilyParts) -> DecoderShape:
    """The decoder with what the tower gives it; raises UserError if one has positions of rows and columns and the other not."""
    if (shape.sections is None) != (family.positions == "rows"):
        raise UserError(f"config.json: mrope_section is {shape.sections} and frames take positions by {family.positions!r}")
    if parts.deepstack > shape.layers:
        raise UserError(f"config.json: {parts.deepstack} deepstack_visual_indexes and only {shape.layers} decoder layers")
    return replace(shape, deepstack=parts.deepstack)


def decoder_shape(checkpoint: Checkpoint) -> tuple[Backbone, DecoderShape]:
    text = with_defaults(checkpoint.section("text_config"))
    backbone = text_backbone(str(text.get("model_type")))
    tied = bool(checkpoint.config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    try:
        return backbone, backbone.shape(text, tied)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.folder / 'config.json'}: text_config is incomplete ({error!r})") from None


def _decoder_section(checkpoint: Checkpoint, family: Family, shape: DecoderShape, made: decoder.DecoderFiles) -> dict[str, Any]:
    text = checkpoint.section("text_config")
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
        "trained_length": _trained_length(checkpoint, shape),
        "graphs": made.graphs,
        "embedding": made.embedding[0],
        "embedding_scales": made.embedding[1] if made.embedding[1:] else None,
        "fading": list(family.fading),
        "rope_sections": None if shape.sections is None else list(shape.sections),
        "rope_interleaved": shape.interleaved,
        "deepstack": shape.deepstack,
    }


def _trained_length(checkpoint: Checkpoint, shape: DecoderShape) -> int:
    text = checkpoint.section("text_config")
    return int(checkpoint.config.get("edgevlm_trained_length", text.get("edgevlm_trained_length", shape.model_limit)))


def _record(path: Path) -> dict[str, Any]:
    record = hash_file(path)
    return {"bytes": record.bytes, "sha256": record.sha256}

"""Run an export: read the checkpoint, write graphs and other files, and move the finished bundle to its folder."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.export import decoder, vision
from edgevlm.export.backbones import Backbone, DecoderShape, inverse_frequencies, text_backbone
from edgevlm.export.chat import chat
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.families import Family, FamilyParts, load_family
from edgevlm.export.frames import frame_preparation
from edgevlm.export.graph import ExportJournal, save_slices
from edgevlm.export.kv_scales import add_scales
from edgevlm.export.options import ActivationSampler, ExportOptions, Samples, fingerprint
from edgevlm.export.prequantised import PREQUANTISED, check_no_zero_points, prequantised, stored_in
from edgevlm.export.profiles import Profile, load_profile, rounded_layout
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import FORMAT, MANIFEST, Bundle, check_target, hash_file, seal_manifest
from edgevlm.runtime.files import atomic_directory, journal_of
from edgevlm.runtime.graph_profiles import vision_precision
from edgevlm.runtime.plugins import blamed, place
from edgevlm.runtime.positions import position_rule

CLOSING = "closing.npy"
CHUNK = 8  # the number of frames that a session encodes at once by default
QUESTION = 512
FRAME_TEXT = 32  # tokens of text around a frame for which an engine has room


def write_bundle(source: Path, out_dir: Path, options: ExportOptions, progress: Notify, notify: Notify, *, force: bool) -> Path:
    """Write a bundle to ``out_dir`` and return its path; see :func:`edgevlm.export.export_checkpoint`."""
    checkpoint, profile = Checkpoint(source), load_profile(options.profile)
    profile.check_kv(options.kv)
    precision = _precision(checkpoint, options, profile)
    tower = vision_precision(profile.name, options.vision_precision, precision)
    options = replace(options, precision=precision, vision_precision=tower)
    check = partial(check_target, force=force)
    check(out_dir)
    model = _read(checkpoint, options, profile, progress)
    vision.check_tensors(model.parts.vision, checkpoint)
    model.backbone.check(checkpoint, model.shape)
    for line in checkpoint.notes:
        notify(line)
    with atomic_directory(out_dir, check, key=fingerprint(source, options.facts()), notify=notify) as folder:
        samples = options.samples
        if isinstance(samples, ActivationSampler):
            samples = samples.sample(folder.parent)
        with ExportJournal(journal_of(folder)) as journal:
            model.write(folder, journal, progress, samples)
    return out_dir


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint whose settings have been read, but whose weights have not."""

    checkpoint: Checkpoint
    options: ExportOptions
    profile: Profile
    name: str
    family: Family
    backbone: Backbone
    shape: DecoderShape
    parts: FamilyParts
    chat: dict[str, Any]
    tokenizer: str
    frames: dict[str, Any]

    def write(self, folder: Path, journal: ExportJournal, progress: Notify, samples: Samples | None) -> None:
        checkpoint, parts, family, options, profile = self.checkpoint, self.parts, self.family, self.options, self.profile
        progress("writing the vision tower")
        tower = partial(vision.write_vision, parts.vision, checkpoint, folder, str(options.vision_precision))
        changed = journal.once(vision.GRAPH, partial(tower, profile.is_tensorrt, changed=not profile.is_tensorrt))
        has_text = bool(family.before or family.after)
        made = decoder.write_decoder(
            checkpoint, self.backbone, self.shape, folder, options,
            progress=progress, sparse=not has_text, samples=samples, journal=journal,
        )  # fmt: skip
        (folder / self.chat["tokenizer"]).write_text(self.tokenizer, encoding="utf-8")
        if parts.closing is not None:
            save_slices(folder / CLOSING, len(parts.closing), [parts.closing])
        progress("hashing")
        tokens, group = math.prod(parts.grid), parts.vision.group
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "edgevlm": __version__,
            "family": self.name,
            "source": checkpoint.source,
            "profile": profile.name,
            "decoder": self._decoder_section(made)
            | {
                "precision": options.precision,
                "rounding": "nearest" if samples is None else "gptq",
                "kv": options.kv,
            },
            "vision": {
                "graph": vision.GRAPH,
                **self.frames,
                "tokens_per_frame": tokens,
                "grid": list(parts.grid),
                "closing": None if parts.closing is None else CLOSING,
                "group": group,
                "positions": position_rule(family.positions, options.positions),
                "tokens_per_second": parts.tokens_per_second,
                "longest_edge": parts.longest_edge,
                "before": family.before,
                "after": family.after,
                "pixels": None if parts.pixels is None or profile.is_tensorrt else asdict(parts.pixels),
                "changed": changed,
            },
            "chat": self.chat,
            "files": {path.name: asdict(hash_file(path)) for path in sorted(folder.iterdir()) if path.name != MANIFEST},
        }
        if profile.is_tensorrt:  # TensorRT tunes engines for the sizes in ``shapes``
            frames = -(-CHUNK // group) * group
            rows = frames // group * (tokens + (FRAME_TEXT if has_text else 0))
            manifest["shapes"] = {"frames": frames, "rows": rows, "question": QUESTION}
        if options.kv == "int8":
            add_scales(folder, manifest, progress)
        (folder / MANIFEST).write_bytes(seal_manifest(manifest))
        Bundle.load(folder, verify="size")

    def _decoder_section(self, made: decoder.DecoderFiles) -> dict[str, Any]:
        shape, text = self.shape, self.checkpoint.section("text_config")
        trained = text.get("edgevlm_trained_length", shape.model_limit)
        return {
            "backbone": text["model_type"],
            **{name: getattr(shape, name) for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab")},
            "rope_theta": shape.rope_theta,
            "inv_freq": shape.inv_freq(),
            "model_limit": shape.model_limit,
            "trained_length": int(self.checkpoint.config.get("edgevlm_trained_length", trained)),
            "graphs": made.graphs,
            "embedding": made.embedding[0],
            "embedding_scales": made.embedding[1] if made.embedding[1:] else None,
            "fading": list(self.family.fading),
            "rope_sections": None if shape.sections is None else list(shape.sections),
            "rope_interleaved": shape.interleaved,
            "windows": list(shape.windows),
            "local_inv_freq": []
            if shape.local_theta is None
            else inverse_frequencies(shape.local_theta, shape.head_dim).tolist(),
            "whole_frames": shape.whole_frames,
            "deepstack": shape.deepstack,
        }


def _read(checkpoint: Checkpoint, options: ExportOptions, profile: Profile, progress: Notify) -> ModelSource:
    model_type, config = str(checkpoint.config.get("model_type")), checkpoint.folder / "config.json"
    family = load_family(options.family or model_type, config)
    backbone, shape = decoder_shape(checkpoint, family.backbone)
    if profile.is_tensorrt and (shape.windows or shape.whole_frames):
        raise UserError(f"{config}: window or whole-frame attention is not supported by {profile.name}; remove --device")
    decoder.first_sparse_layer(shape, options.st_spattn_from)
    progress("reading the vision tower")
    try:
        with blamed(f"family {model_type}", family):
            parts = family.parts(checkpoint, options.camera)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{config}: invalid or missing setting ({error!r})") from None
    if (made := math.prod(parts.grid)) != parts.vision.tokens:
        rows, columns = parts.grid
        what = f"its grid of {rows} x {columns} has {made} tokens, but its tower has {parts.vision.tokens}"
        raise UserError(f"family {model_type}: {what}; correct parts() ({place(type(family))})")
    if (shape.sections is None) != (family.positions == "rows"):
        raise UserError(f"{config}: mrope_section {shape.sections} does not match frame positions {family.positions!r}")
    if parts.deepstack > shape.layers:
        raise UserError(f"{config}: {parts.deepstack} deepstack_visual_indexes, but only {shape.layers} decoder layers")
    shape = replace(shape, deepstack=parts.deepstack)
    talk, tokenizer = chat(checkpoint, family, shape.vocab)
    frames = frame_preparation(checkpoint, family.processors, parts.vision.size, is_sized=family.is_sized)
    if parts.longest_edge is not None:
        frames["fit"] = "longest"
    frames["precision"] = options.vision_precision
    return ModelSource(checkpoint, options, profile, model_type, family, backbone, shape, parts, talk, tokenizer, frames)


def _precision(checkpoint: Checkpoint, options: ExportOptions, profile: Profile) -> str:
    """Return the precision to export to. Raises UserError if this export cannot use the precision."""
    packing, chosen = prequantised(checkpoint.config), stored_in(checkpoint.config, options.precision)
    if profile.is_tensorrt:
        check_no_zero_points(checkpoint.config, checkpoint.folder)
    profile.precision(chosen)
    if options.samples is not None:
        rounded_layout(chosen, profile.name)
    if packing is not None and (chosen != PREQUANTISED or options.samples is not None):
        where = checkpoint.folder / "config.json"
        raise UserError(f"{where}: {packing.method} weights are already in 4 bits; remove --precision and --rounding")
    return chosen


def decoder_shape(checkpoint: Checkpoint, own: Backbone | None = None) -> tuple[Backbone, DecoderShape]:
    text = with_defaults(checkpoint.section("text_config"))
    backbone = own or text_backbone(str(text.get("model_type")))
    try:
        return backbone, backbone.shape(text, checkpoint.is_tied(text))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.folder / 'config.json'}: text_config is incomplete ({error!r})") from None

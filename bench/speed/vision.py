"""Vision towers of real size with random weights, in fp32 and int8, beside transformers' own and beside graphs for one size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from numpy.typing import NDArray

from edgevlm.apps.planning.model import published_config
from edgevlm.bench.output import prefixed
from edgevlm.bench.seeded import SeededTensors, decoder_bundle
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.errors import UserError, nearest
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.checkpoint import Checkpoint, ConfigOnly
from edgevlm.export.families import load_family
from edgevlm.export.vision import GRAPH, check_precision, write_vision
from edgevlm.export.writer import family_parts
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import FileRecord
from edgevlm.runtime.engine import Engine, load_engine

HIDDEN = 896  # of the decoder that features are made for, where the tower does not say

Float32 = NDArray[np.float32]
Encode = Callable[[Float32], Any]
OURS, OTHER = "edgevlm", "transformers"


@dataclass(frozen=True, slots=True)
class TimedTower:
    """A tower: ``depth`` names its number of layers, ``side`` is a frame's in pixels, ``reference`` transformers' class."""

    family: str
    vision: dict[str, Any]
    depth: str
    side: int
    reference: str

    def shortened(self, layers: int | None) -> TimedTower:
        """The tower with its first ``layers`` layers."""
        if layers is None:
            return self
        lists = {name: indexes for name, indexes in self.vision.items() if isinstance(indexes, list)}  # of layers
        kept = {name: [index for index in indexes if index < layers] for name, indexes in lists.items()}
        return replace(self, vision=self.vision | {self.depth: layers} | kept)


def _published(family: str, name: str, kind: str, depth: str, side: int, reference: str, **more: Any) -> TimedTower:
    vision = published_config(name)["vision_config"] | {"model_type": kind} | more
    return TimedTower(family, vision, depth, side, reference)


SIGLIP = partial(
    _published, "llava_onevision", kind="siglip_vision_model", depth="num_hidden_layers", reference="SiglipVisionModel",
    vision_use_head=False,
)  # fmt: skip
QWEN = partial(_published, depth="depth", side=448)
TOWERS = {
    "siglip-so400m-384": SIGLIP("HuggingFaceTB/SmolVLM2-2.2B-Instruct", side=384),
    "siglip-base-512": SIGLIP("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", side=512),
    "qwen2-vl-448": QWEN(
        "qwen2_vl", "Qwen/Qwen2-VL-2B-Instruct", "qwen2_vl_vision", reference="Qwen2VisionTransformerPretrainedModel"
    ),
    "qwen2.5-vl-448": QWEN(
        "qwen2_5_vl", "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl_vision", tokens_per_second=2,
        reference="Qwen2_5_VisionTransformerPretrainedModel",
    ),
    "qwen3-vl-448": QWEN("qwen3_vl", "Qwen/Qwen3-VL-2B-Instruct", "qwen3_vl_vision", reference="Qwen3VLVisionModel"),
}  # fmt: skip


class SeededCheckpoint(ConfigOnly):
    """A folder with a configuration and no weights; tensors are random, the same for the same name."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Float32:
        return SeededTensors().tensor(name, shape)

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[Float32]:
        yield self.tensor(name, shape)

    def check(self, name: str, shape: tuple[int, ...]) -> Any:
        """Every tensor is there, of any shape."""


def checkpoint_of(tower: TimedTower, folder: Path) -> SeededCheckpoint:
    """A checkpoint of ``tower``; its configuration is written into ``folder``."""
    text = {"model_type": "qwen2", "hidden_size": HIDDEN}
    config = {"model_type": tower.family, "vision_config": tower.vision, "text_config": text, "vision_feature_layer": -1}
    config |= {"vision_feature_select_strategy": "full", "projector_hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1, "max_pixels": 2 * tower.side**2}))
    return SeededCheckpoint(folder)


def engine_of(tower: TimedTower, checkpoint: Checkpoint, folder: Path, precision: str, threads: int) -> Engine:
    """Load an engine with ``tower`` and a decoder of no size worth naming."""
    parts = family_parts(checkpoint, load_family(tower.family, folder), (tower.side, tower.side))
    layers, hidden = max(1, parts.deepstack), tower.vision.get("out_hidden_size", HIDDEN)
    shape = DecoderShape(
        layers, 1, 1, 8, hidden, 8, 8, norm_eps=1e-6, rope_theta=1e4, model_limit=64, tied=True, deepstack=parts.deepstack
    )
    bundle = decoder_bundle(folder, shape)
    made = parts.vision
    write_vision(made, checkpoint, folder, precision)
    spec = replace(
        bundle.vision, graph=GRAPH, size=made.size, tokens_per_frame=prod(parts.grid), group=made.group, precision=precision,
    )  # fmt: skip
    files = {path.name: FileRecord(path.stat().st_size, "") for path in folder.iterdir() if path.is_file()}
    bundle = replace(bundle, vision=spec, files=files)
    return load_engine("onnxruntime-cpu", bundle, threads=threads)


def reference(tower: TimedTower, checkpoint: Checkpoint) -> Encode:
    """Load transformers' own tower with the weights of ``checkpoint``; it takes ``[F, 3, side, side]``."""
    settings = {key: value for key, value in tower.vision.items() if key != "model_type"}
    kind = getattr(transformers, tower.reference, None) or getattr(
        import_module(f"transformers.models.{tower.family}.modeling_{tower.family}"), tower.reference
    )
    model = kind(kind.config_class(**settings)).eval()
    for name, parameter in model.named_parameters():
        canonical = f"vision.{name.removeprefix('vision_model.')}"
        parameter.data = torch.from_numpy(checkpoint.tensor(canonical, tuple(parameter.shape)))
    if not tower.family.startswith("qwen"):
        return lambda frames: model(torch.from_numpy(frames))
    patch, merge, group = (tower.vision[key] for key in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
    edge = tower.side // patch

    def run(frames: Float32) -> object:
        padded = np.concatenate([frames, np.repeat(frames[-1:], -len(frames) % group, 0)])
        squares = (edge // merge, merge, patch)
        tiles = padded.reshape(-1, group, 3, *squares, *squares).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        patches = torch.from_numpy(np.ascontiguousarray(tiles).reshape(-1, 3 * group * patch * patch))
        return model(patches, torch.tensor([[len(padded) // group, edge, edge]]))

    return run


def vision(
    tower: Sequence[str] = ("siglip-so400m-384",),
    precisions: Sequence[str] = ("fp32", "int8"),
    frames: Sequence[int] = (1, 4),
    against: Sequence[str] = (OTHER,),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 3,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Time a tower by precision and ``frames`` in a call; then ratios to ``against``, then how far int8's features are off.

    Frames and weights are random. ``working_mb``: what the process grew by in a runtime's first call; ``max_error``: the
    largest difference of int8's features from fp32's, over their root mean square. Raises UserError for a tower, precision or
    runtime that is not known.
    """
    if unknown := [name for name in tower if name not in TOWERS]:
        raise UserError(f"--tower {unknown[0]!r} is not known; {nearest(unknown[0], TOWERS)}")
    for name in precisions:
        check_precision(name)
    if set(against) - {OTHER}:
        raise UserError(f"--against {', '.join(against)}: there is {OTHER}")
    torch.set_num_threads(threads)
    for name in tower:
        chosen = TOWERS[name].shortened(layers)
        place = {"bench": "vision", "tower": name, "layers": chosen.vision[chosen.depth], "threads": threads}
        with ExitStack() as stack, torch.inference_mode():
            encoders = _encoders(chosen, precisions, against, threads, stack, prefixed(progress, name))
            for batch in frames:
                progress(f"{name}: timing {batch} frames a call")
                yield from _measured(encoders, _frames(chosen, batch), rounds, {**place, "batch": batch})
            if {"fp32", "int8"} <= set(precisions):
                exact, rounded = (encoders[OURS, precision](_frames(chosen, 2)) for precision in ("fp32", "int8"))
                yield {**place, "runtime": OURS, "precision": "int8", **error(exact, rounded)}


def _encoders(
    tower: TimedTower, precisions: Sequence[str], against: Sequence[str], threads: int, stack: ExitStack, progress: Notify
) -> dict[tuple[str, str], Encode]:
    """Runtime and precision -> what encodes frames."""
    encoders: dict[tuple[str, str], Encode] = {}
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="edgevlm-bench-")))
    checkpoint = checkpoint_of(tower, folder)
    for precision in precisions:
        progress(f"random weights in {precision}")
        place = folder / precision
        place.mkdir()
        engine = engine_of(tower, checkpoint, place, precision, threads)
        stack.callback(engine.close)
        encoders[OURS, precision] = engine.encode
    if OTHER in against:
        progress("the same in transformers")
        encoders[OTHER, "fp32"] = reference(tower, checkpoint)
    return encoders


def _measured(
    encoders: dict[tuple[str, str], Encode], frames: Float32, rounds: int, place: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    working = {key: _grows(partial(encode, frames)) for key, encode in encoders.items()}
    took = take_turns({key: Job(partial(encode, frames), len(frames)) for key, encode in encoders.items()}, rounds)
    for (runtime, precision), times in took.items():
        grown = {"working_mb": round(working[runtime, precision] / 1e6)}
        yield {**place, "runtime": runtime, "precision": precision, **figures("frame", times), **grown}
    for (runtime, precision), times in took.items():
        if runtime == OURS and (OTHER, "fp32") in took:
            compared = {"runtime": runtime, "precision": precision, "against": OTHER}
            yield {**place, **compared, **ratio(times, took[OTHER, "fp32"])}


def _grows(run: Callable[[], object]) -> int:
    process = psutil.Process()
    before = process.memory_info().rss
    run()
    return int(process.memory_info().rss - before)


def _frames(tower: TimedTower, count: int) -> Float32:
    return np.random.default_rng(0).standard_normal((count, 3, tower.side, tower.side), np.float32)


def error(exact: Float32, rounded: Float32) -> dict[str, float]:
    """Cosine of all features, and their largest difference over the root mean square of the exact ones."""
    cosine = float(np.vdot(exact, rounded) / (np.linalg.norm(exact) * np.linalg.norm(rounded)))
    largest = float(np.abs(exact - rounded).max() / np.sqrt(np.mean(exact**2)))
    return {"cosine": round(cosine, 6), "max_error": round(largest, 4)}

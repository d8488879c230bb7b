"""Read the numbers that a plan needs from a bundle's files or a checkpoint's JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgevlm.engines.onnx_file import initializer_shapes
from edgevlm.errors import BundleError, UserError
from edgevlm.export.backbones import text_backbone
from edgevlm.export.checkpoint import Checkpoint, ConfigOnly, with_defaults
from edgevlm.export.families import Family, FrameSize, TowerGeometry, load_family
from edgevlm.export.frames import pixel_budget
from edgevlm.export.prequantised import PREQUANTISED, prequantised
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.bundle import MANIFEST, Bundle, PixelBudget, VisionSpec
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.files import look
from edgevlm.runtime.model import bundle_folder, load_tokenizer

DECODER, VISION = "decoder.weights", "vision.weights"
MLP = "layer0.mlp"  # name of the first layer's matrix that joins gate and up
VECTOR = re.compile(r"final_norm\.weight|layer\d+\..*(norm\.weight|\.bias)")
PREFIX = 32  # assumed rows of the system prompt: counting them needs the tokenizer


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's sizes, from which a plan is computed.

    ``matrices`` counts the parameters in the layers' matrices, ``vectors`` those in norms and biases. ``tied`` is true if the
    head shares the embedding's weights. ``limit`` is the largest number of positions in a stream. ``group`` is the number of
    rounded weights that share a scale, or None. ``floats`` counts the matrix parameters that a rounded checkpoint stores as
    floats. ``files`` holds the sizes in bytes of a bundle's ``decoder``, ``embedding`` and ``vision`` weights.
    """

    name: str
    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    matrices: int
    vectors: int
    tied: bool
    axes: int
    limit: int
    tower: TowerGeometry
    prefix: int
    closing: int = 0
    deepstack: int = 0
    precision: str = "fp32"
    group: int | None = None
    floats: int = 0
    kv: str = "fp16"
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def table(self) -> int:
        """Return the number of parameters in the embedding. The output head has the same number of parameters."""
        return self.vocab * self.hidden

    @property
    def text_rows(self) -> int:
        """Return the number of rows reserved for a conversation, a question and its answer."""
        text = TextBudget.fitting(self.limit)
        return text.conversation + text.question + text.answer + self.closing

    @property
    def least_budget(self) -> int:
        """Return the smallest budget that every policy accepts: two frames."""
        return 2 * self.tower.rows

    @property
    def most_budget(self) -> int:
        """Return the largest budget that leaves positions for prefix and text."""
        return self.limit - self.prefix - self.text_rows

    def capacity(self, budget: int) -> int:
        """Return the number of rows in each layer's cache: prefix, budget and text."""
        return self.prefix + budget + self.text_rows


def layer_matrices(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> int:
    """Return the number of parameters in the matrices of a decoder layer's attention (q, k, v, o) and MLP (gate, up, down)."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner


def model_of(name: str, camera: tuple[int, int]) -> PlannedModel:
    """Return the planned model of the demo, a folder or an id in models.json. ``camera`` is the frames' (height, width)."""
    if name == "demo" or (Path(name) / MANIFEST).exists():
        return plan_bundle(name, camera)
    facts = None if Path(name).exists() else next((each for each in published_facts() if each["id"] == name), None)
    return plan_checkpoint(Path(name), camera) if facts is None else plan_published(facts, camera)


def plan_published(facts: Mapping[str, Any], camera: tuple[int, int]) -> PlannedModel:
    """Return the planned model of an entry in models.json. ``camera`` is the frames' (height, width)."""

    def sized(factor: int, budget: tuple[int, int], clip: int) -> tuple[int, int]:
        return PixelBudget(factor, budget[0], budget[1] * clip, clip).fitted(*camera)

    return planned(facts["id"], facts["config"], sized)


def plan_checkpoint(folder: Path, camera: tuple[int, int]) -> PlannedModel:
    """Return the planned model of the checkpoint in ``folder``. ``camera`` is the frames' (height, width).

    Raises UserError for a checkpoint that cannot be exported.
    """
    checkpoint: Checkpoint = ConfigOnly(folder)
    if all(look(checkpoint.folder / name) == "file" for name in checkpoint.weight_files()):
        checkpoint = Checkpoint(folder)
    packing = prequantised(checkpoint.config)
    where = checkpoint.folder / "config.json"
    family = load_family(str(checkpoint.config.get("model_type")), where)
    config = with_defaults(checkpoint.config) | {
        "text_config": with_defaults(checkpoint.section("text_config")),
        "vision_config": with_defaults(checkpoint.section("vision_config"), family.vision_type),
    }

    def sized(factor: int, budget: tuple[int, int], sharing: int) -> tuple[int, int]:
        return pixel_budget(checkpoint, family.processors, factor, budget, sharing, needs_file=False).fitted(*camera)

    try:
        text = config["text_config"]
        model = replace(planned(checkpoint.name, config, sized), tied=checkpoint.is_tied(text))
        if packing is None:
            return model
        backbone = family.backbone or text_backbone(str(text["model_type"]))
        floats = backbone.left_in_float(checkpoint, backbone.shape(text, model.tied)) if checkpoint.tensors else 0
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: invalid or missing setting ({error!r})") from None
    return replace(model, precision=PREQUANTISED, group=packing.group, floats=floats)


def planned(name: str, config: Mapping[str, Any], sized: FrameSize) -> PlannedModel:
    """Make the planned model from a checkpoint's config. Raises KeyError, TypeError or ValueError if it is incomplete."""
    text, vision, name_of = config["text_config"], config["vision_config"], str(config["model_type"])
    family = load_family(name_of, name)
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    shape = (family.backbone or text_backbone(str(text["model_type"]))).shape(text, tied)
    limit = int(config.get("edgevlm_trained_length", text.get("edgevlm_trained_length", shape.model_limit)))
    sizes = (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate)
    widths = {
        "q": shape.heads * shape.head_dim, "k": shape.kv_size, "v": shape.kv_size, "o": shape.hidden,
        "gate": shape.intermediate, "up": shape.intermediate, "down": shape.hidden,
    }  # fmt: skip
    vectors = 2 * shape.hidden + 2 * shape.head_dim * shape.head_norms + sum(widths[part] for part in shape.biases)
    return PlannedModel(
        name=name, family=name_of, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        hidden=shape.hidden, inner=shape.intermediate, vocab=shape.vocab, matrices=shape.layers * layer_matrices(*sizes),
        vectors=shape.layers * vectors + shape.hidden, tied=tied,
        axes=1 if shape.sections is None else 3, limit=min(limit, shape.model_limit), tower=family.geometry(config, sized),
        prefix=PREFIX, closing=family.closing_rows, deepstack=len(vision.get("deepstack_visual_indexes", ())),
    )  # fmt: skip


def plan_bundle(name: str, camera: tuple[int, int] | None = None) -> PlannedModel:
    """Return the planned model of ``demo`` or a bundle. ``camera`` is the frames' (height, width) if the bundle takes any size.

    Raises BundleError for an incomplete bundle, UserError for an unknown family.
    """
    bundle = Bundle.load(bundle_folder(name), verify="size")
    family = load_family(bundle.family, bundle.path)
    spec, vision = bundle.decoder, bundle.vision if camera is None else bundle.vision.for_frames(*camera)
    sizes = {name: record.bytes for name, record in bundle.files.items()}
    embedding = sum(size for name, size in sizes.items() if name.startswith("embedding") and name.endswith(".npy"))
    files = {"decoder": sizes.get(DECODER, 0), "embedding": embedding, "vision": sizes.get(VISION, 0)}
    graph, tokenizer = bundle.file(spec.graphs["full"]), load_tokenizer(bundle)
    tensors = shapes_in(graph)
    codes = tensors.get(f"{MLP}.codes", ())  # shape [out, blocks, bytes] if blocks of weights share scales, else [in, out]
    matrix = tensors.get(f"{MLP}.weight") or codes
    if not matrix:
        raise BundleError(f"matrix {MLP} not found in the decoder's graph; export the checkpoint again")
    inner = matrix[0 if len(matrix) == 3 else 1] // 2
    return PlannedModel(
        name=name, family=bundle.family, layers=spec.layers, heads=spec.heads,
        kv_heads=spec.kv_heads, head_dim=spec.head_dim, hidden=spec.hidden, inner=inner, vocab=spec.vocab,
        matrices=spec.layers * layer_matrices(spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, inner),
        vectors=sum(prod(shape) for name, shape in tensors.items() if VECTOR.fullmatch(name)),
        tied=spec.embedding.encode() in graph.read_bytes(),  # the graph reads the embedding's file if the head is tied
        axes=spec.axes, limit=bundle.limit,
        tower=_tower(family, vision, bundle.file(vision.graph), tokenizer),
        prefix=len(Chat(bundle.chat, tokenizer).prefix),
        closing=len(bundle.closing_rows()), deepstack=spec.deepstack, precision=spec.precision,
        group=-(-spec.hidden // codes[1]) if len(codes) == 3 else None, kv=spec.kv, files=files,
    )  # fmt: skip


def shapes_in(graph: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a graph's initializers by name. Raises BundleError if the file is not ONNX."""
    try:
        return initializer_shapes(graph.read_bytes())
    except ValueError as error:
        raise BundleError(f"{graph}: {error}; export the checkpoint again") from None


def _tower(family: Family, vision: VisionSpec, graph: Path, tokenizer: Tokenizer) -> TowerGeometry:
    """Estimate a vision tower's sizes from its number of parameters, because the ONNX graph does not contain the sizes."""
    parameters = sum(prod(shape) for name, shape in shapes_in(graph).items() if not name.endswith((".scales", ".zero")))
    tokens, patches = vision.tokens_per_frame, family.patches(vision)
    around = (vision.before + vision.after).format(seconds=0.0, minutes=0, second=0, frame=1)
    text = len(tokenizer.encode(around, add_special_tokens=False)) if around else 0
    other = {"group": vision.group, "precision": vision.precision, "text": text}
    return TowerGeometry.estimated(parameters, tokens, patches, vision.size, **other)


def published_facts() -> list[dict[str, Any]]:
    """Return the models listed in models.json. Each model has an ``id`` on the hub, ``licence``, ``checked`` and ``config``."""
    facts: list[dict[str, Any]] = json.loads(files(__package__ or "").joinpath("models.json").read_text(encoding="utf-8"))
    return facts

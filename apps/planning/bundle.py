"""A bundle as a plan sees it: its manifest, and the sizes of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

from tokenizers import Tokenizer

from edgevlm.apps.planning.shape import BLOCK, PlannedModel, Tower, layer_matrices
from edgevlm.engines.onnx_file import initializer_shapes
from edgevlm.errors import BundleError
from edgevlm.runtime.bundle import MANIFEST, Bundle, VisionSpec
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import bundle_folder

DECODER, VISION = "decoder.weights", "vision.weights"
MLP = "layer0.mlp"  # the matrix of the first layer's gate and up
VECTOR = re.compile(r"final_norm\.weight|layer\d+\..*(norm\.weight|\.bias)")
PATCH = 14  # pixels, of every CLIP and SigLIP tower that LLaVA is published with
SIDE = {"smolvlm": 4, "qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2}  # patches along the edge of what becomes a token
BLOCKS, WIDENING, HEAD = 24, 4, 64  # a tower's usual depth, MLP's width over its own, and width of a head


def plan_bundle(name: str) -> PlannedModel:
    """The model in ``demo`` or a bundle's folder. Raises BundleError for what is no whole bundle; hashes nothing.

    Neither manifest nor graph says how its tower is made: patches are worked out from the family and the frame's size.
    """
    bundle = Bundle.load(bundle_folder(name), verify="size")
    spec, vision = bundle.decoder, bundle.vision
    sizes = {name: record.bytes for name, record in bundle.files.items()}
    files = {
        "decoder": sizes.get(DECODER, 0),
        "embedding": sum(size for name, size in sizes.items() if name.startswith("embedding") and name.endswith(".npy")),
        "vision": sizes.get(VISION, 0),
    }
    graph = bundle.file(spec.graphs["whole"])
    tensors = shapes_in(graph)
    inner = inner_of(tensors)
    tokenizer = Tokenizer.from_file(str(bundle.file(bundle.chat.tokenizer)))
    return PlannedModel(
        name=name, family=bundle.family, layers=spec.layers, heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim,
        hidden=spec.hidden, inner=inner, vocab=spec.vocab,
        matrices=spec.layers * layer_matrices(spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, inner),
        vectors=sum(prod(shape) for name, shape in tensors.items() if VECTOR.fullmatch(name)),
        tied=spec.embedding.encode() in graph.read_bytes(),  # the head is that file, which it names
        axes=spec.axes, limit=bundle.limit,
        tower=_tower(bundle.family, vision, numbers_in(bundle.file(vision.graph)), spec.hidden, tokenizer),
        prefix=len(tokenizer.encode(Chat(bundle.chat, None).prefix, add_special_tokens=False)),
        closing=len(bundle.closing_rows()), deepstack=spec.deepstack, precision=spec.precision,
        group=group_of(tensors, spec.hidden), kv=spec.kv, files=files,
    )  # fmt: skip


def shapes_in(graph: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of the initializers of the graph in a file. Raises BundleError for what is no ONNX file."""
    try:
        return initializer_shapes(graph.read_bytes())
    except ValueError as error:
        raise BundleError(f"{graph}: {error}; export the checkpoint again") from None


def inner_of(tensors: Mapping[str, tuple[int, ...]]) -> int:
    """The MLP's width in a whole decoder graph: half of what its first layer's gate and up make together.

    Raises BundleError for another graph.
    """
    shape = tensors.get(f"{MLP}.weight") or tensors.get(f"{MLP}.codes")
    if shape is None:
        raise BundleError(f"the decoder's graph has no matrix {MLP}; export the checkpoint again")
    return shape[0 if len(shape) == 3 else 1] // 2  # [out, blocks, bytes], or [in, out]


def group_of(tensors: Mapping[str, tuple[int, ...]], width: int) -> int:
    """Weights of a row of ``width`` that share a scale: codes are ``[out, blocks, bytes]``."""
    shape = tensors.get(f"{MLP}.codes", ())
    return -(-width // shape[1]) if len(shape) == 3 else BLOCK


def numbers_in(graph: Path) -> int:
    """Parameters of a vision graph; of a linear in 8 bits its codes, and not what these count."""
    return sum(prod(shape) for name, shape in shapes_in(graph).items() if not name.endswith((".scales", ".zero")))


def _tower(family: str, vision: VisionSpec, parameters: int, hidden: int, tokenizer: Tokenizer) -> Tower:
    """What can be said of a tower of so many parameters that makes ``vision.tokens_per_frame`` tokens of a grid."""
    height, width = vision.size
    tokens = vision.tokens_per_frame
    patches = tokens * SIDE[family] ** 2 if family in SIDE else max(1, height // PATCH) * max(1, width // PATCH)
    columns = max(1, round((parameters / (BLOCKS * (4 + 2 * WIDENING))) ** 0.5))
    text = vision.before + vision.after
    around = text.format(seconds=0.0, minutes=0, second=0)
    return Tower(
        parameters=parameters,
        block_parameters=parameters,
        projector_parameters=0,
        projected=tokens,
        tokens=tokens,
        patches=patches,
        attended=patches,
        blocks=BLOCKS,
        width=columns,
        inner=WIDENING * columns,
        heads=max(1, columns // HEAD),
        size=vision.size,
        group=vision.group,
        text=len(tokenizer.encode(around, add_special_tokens=False)) if around else 0,
        precision=vision.precision,
    )


def is_bundle(folder: Path) -> bool:
    """Whether a folder, or ``demo``, has a bundle's manifest."""
    return str(folder) == "demo" or (folder / MANIFEST).exists()

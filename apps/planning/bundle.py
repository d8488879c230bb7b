"""A bundle as a plan sees it: its manifest, and the sizes of its files."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from edgevlm.apps.planning.shape import PlannedModel, Tower, inner_of
from edgevlm.apps.planning.weights import matrices_in
from edgevlm.runtime.bundle import MANIFEST, Bundle, VisionSpec
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import bundle_folder

DECODER, VISION = "decoder.weights", "vision.weights"
PATCH = 14  # pixels, of every CLIP and SigLIP tower that LLaVA is published with
SIDE = {"smolvlm": 4, "qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2}  # patches along the edge of what becomes a token
BLOCKS, WIDENING, HEAD = 24, 4, 64  # a tower's usual depth, MLP's width over its own, and width of a head


def plan_bundle(name: str) -> PlannedModel:
    """The model in ``demo`` or a bundle's folder. Raises BundleError for what is no whole bundle; hashes nothing.

    A manifest does not say how its tower is made: patches are worked out from the family and the frame's size.
    """
    bundle = Bundle.load(bundle_folder(name), verify="size")
    spec, vision, precision = bundle.decoder, bundle.vision, str(getattr(bundle.decoder, "precision", "fp32"))
    sizes = {name: record.bytes for name, record in bundle.files.items()}
    files = {
        "decoder": sizes.get(DECODER, 0),
        "embedding": sum(size for name, size in sizes.items() if name.startswith("embedding") and name.endswith(".npy")),
        "vision": sizes.get(VISION, 0),
    }
    tied = spec.embedding.encode() in bundle.file(spec.graphs["whole"]).read_bytes()  # the head is that file, which it names
    matrices = matrices_in(files["decoder"], 0 if tied else spec.vocab * spec.hidden, precision)
    tokenizer = Tokenizer.from_file(str(bundle.file(bundle.chat.tokenizer)))
    return PlannedModel(
        name=name, family=bundle.family, layers=spec.layers, heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim,
        hidden=spec.hidden, inner=inner_of(spec, matrices), vocab=spec.vocab, matrices=matrices, vectors=0, tied=tied,
        axes=spec.axes, limit=bundle.limit, tower=_tower(bundle.family, vision, files["vision"] // 4, spec.hidden, tokenizer),
        prefix=len(tokenizer.encode(Chat(bundle.chat, None).prefix, add_special_tokens=False)),
        closing=len(bundle.closing_rows()), deepstack=spec.deepstack, precision=precision,
        kv=str(getattr(spec, "kv", "fp32")), files=files,
    )  # fmt: skip


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
    )


def is_bundle(folder: Path) -> bool:
    """Whether a folder, or ``demo``, has a bundle's manifest."""
    return str(folder) == "demo" or (folder / MANIFEST).exists()

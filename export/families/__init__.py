"""Model families, one class each, with everything that export, plan and policies need to know about a family.

A family is an entry point ``edgevlm.families`` whose name is ``model_type`` in config.json. Nothing here imports onnx
before :meth:`Family.parts` is called, so that ``edgevlm plan`` runs without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import FADING
from edgevlm.runtime.plugins import is_file, load_class, names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgevlm.export.backbones import Backbone
    from edgevlm.export.checkpoint import Checkpoint
    from edgevlm.export.vision import Tower
    from edgevlm.runtime.bundle import PixelBudget, VisionSpec

BLOCKS, WIDENING, HEAD = 24, 4, 64  # a tower's usual depth, MLP's width over its own, and width of a head
Config = Mapping[str, Any]
FrameSize = Callable[[int, tuple[int, int], int], tuple[int, int]]
"""(factor, (fewest, most) pixels, frames that share them) to (height, width): multiples of factor within the pixel budget."""


@dataclass(frozen=True, slots=True)
class TowerGeometry:
    """A vision tower in numbers. One frame, or ``group`` frames together, become a grid of ``tokens`` decoder rows.

    parameters: all stored numbers, including constants of the graph. block_parameters: those applied to each of ``patches``.
    projector_parameters: those applied to each of ``projected`` rows. attended: keys that a patch sees, the mean over
    ``blocks``. size: (height, width) of a frame, pixels. text: rows of text around each grid. precision: of its linears.
    """

    parameters: int
    block_parameters: int
    projector_parameters: int
    projected: int
    tokens: int
    patches: int
    attended: float
    blocks: int
    width: int
    inner: int
    heads: int
    size: tuple[int, int]
    group: int = 1
    text: int = 0
    precision: str = "fp32"

    @property
    def rows(self) -> int:
        """The decoder's rows for each grid."""
        return self.tokens + self.text

    @classmethod
    def estimated(cls, parameters: int, tokens: int, patches: int, size: tuple[int, int], **others: Any) -> TowerGeometry:
        """Estimate a tower from its number of parameters only: BLOCKS plain blocks with full attention."""
        width = max(1, round((parameters / (BLOCKS * (4 + 2 * WIDENING))) ** 0.5))
        return cls(
            parameters=parameters, block_parameters=parameters, projector_parameters=0, projected=tokens, tokens=tokens,
            patches=patches, attended=patches, blocks=BLOCKS, width=width, inner=WIDENING * width, heads=max(1, width // HEAD),
            size=size, **others,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FamilyParts:
    """The export parts of one checkpoint."""

    vision: Tower  # pixels [G, group * 3, H, W] -> rows [G, tokens, width]
    grid: tuple[int, int]  # rows and columns of a frame's tokens
    closing: NDArray[np.float32] | None = None  # rows that close a video, [n, hidden]
    tokens_per_second: float | None = None  # see VisionSpec
    deepstack: int = 0  # decoder layers that the tower gives features for, beside the embeddings
    longest_edge: int | None = None  # frames are first resized to, before they are stretched
    pixels: PixelBudget | None = None  # sizes of frames, where the tower takes more than one


class Family:
    """A model family: set the attributes that differ, and write :meth:`parts`."""

    vision_type: ClassVar[str] = ""  # model_type of vision_config, where early checkpoints give the whole model's
    content_type: ClassVar[str] = "video"  # the chat template's word for what is watched
    token_keys: ClassVar[tuple[str, ...]] = ("video_token_id", "video_token_index")  # of the placeholder, newest first
    processors: ClassVar[tuple[str, ...]] = ("video_processor", "image_processor")  # sections or files, best first
    is_sized: ClassVar[bool] = False  # whether frames are sized by the processor's pixel budget
    keeps_aspect: ClassVar[bool] = False  # whether they are of the camera's own aspect
    positions: ClassVar[str] = "rows"  # how frames take positions: see VisionSpec
    before: ClassVar[str] = ""  # text around each frame; {seconds}, {minutes}, {second} are its time, {frame} its number from 1
    after: ClassVar[str] = ""
    opening: ClassVar[str] = ""  # text that the processor, not the template, puts before the first frame,
    ending: ClassVar[str] = ""  # and after the last
    placeholder: ClassVar[str] = ""  # what the chat template writes for a video, where that is not the placeholder's token
    around: ClassVar[tuple[str, str]] = ("", "")  # what it writes beside that and the frames bring themselves
    text_tokens: ClassVar[int] = 0  # of ``before`` and ``after``, a time of four digits among them
    closing_rows: ClassVar[int] = 0
    merge: ClassVar[int] = 1  # patches along the edge of what becomes a token
    fading: ClassVar[tuple[str, str]] = FADING  # HERMES's k and omega: see DecoderSpec
    tokenizer_class: ClassVar[str | None] = ""  # of transformers where no file names one; None: tokenizer.json as it is
    backbone: ClassVar[Backbone | None] = None  # its decoder; None: what ``text_config.model_type`` names
    template: ClassVar[str] = ""  # the chat template, where transformers' processor takes its own for a video

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        """Return the parts, for frames of ``camera`` (height, width). Raises UserError for a checkpoint it cannot express."""
        raise NotImplementedError

    def geometry(self, config: Config, sized: FrameSize) -> TowerGeometry:
        """Return a plan's numbers of the tower in a complete ``config.json``, whose sections have transformers' defaults.

        By default it builds :meth:`parts` from tensors that are all zero.
        """
        from edgevlm.export.checkpoint import DeclaredOnly
        from edgevlm.export.vision import tower_parameters

        checkpoint = DeclaredOnly(config)
        tower = self.parts(checkpoint, (480, 640)).vision
        rows, columns = tower.patch_grid
        number = tower_parameters(tower, checkpoint)
        text = self.text_tokens
        return TowerGeometry.estimated(number, tower.tokens, rows * columns, tower.size, group=tower.group, text=text)

    def patches(self, vision: VisionSpec) -> int:
        """Return the number of patches in a bundle's grid."""
        return vision.tokens_per_frame * self.merge**2


def load_family(model_type: str, where: object) -> Family:
    """Return the family of a ``model_type`` or ``./file.py:Class``; raises UserError, naming the file ``where``, for others."""
    if not is_file(model_type) and model_type not in (known := names("families")):
        raise UserError(f"{where}: models of type {model_type!r} are not exported; there are: {', '.join(known)}")
    family: Family = load_class("families", model_type)()
    return family


def block_parameters(width: int, inner: int, gated: bool = False) -> int:
    """Return the parameters of a tower's block: q, k, v, o and an MLP of two or three matrices, with biases."""
    mlp = (3 if gated else 2) * width * inner + (2 * inner if gated else inner) + width
    return 4 * (width * width + width) + mlp


def square_geometry(
    vision: Config, blocks: int, projector: int, projected: int, tokens: int, *, text: int = 0, more: int = 0
) -> TowerGeometry:
    """Return the geometry of the first ``blocks`` of a SigLIP or CLIP tower: square frames, full attention.

    more: further parameters.
    """
    width, inner, patch = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "patch_size"))
    is_clip, size = vision["model_type"] == "clip_vision_model", int(vision["image_size"])
    patches, each = (size // patch) ** 2 + is_clip, block_parameters(width, inner)
    stem = 3 * patch * patch * width + patches * width + (3 * width if is_clip else width)
    return TowerGeometry(
        parameters=stem + blocks * (each + 4 * width) + projector + more,
        block_parameters=blocks * each, projector_parameters=projector, projected=projected, tokens=tokens, patches=patches,
        attended=patches, blocks=blocks, width=width, inner=inner, heads=int(vision["num_attention_heads"]), size=(size, size),
        text=text,
    )  # fmt: skip

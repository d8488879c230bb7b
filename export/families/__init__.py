"""Define model families: a family is a class that tells export, plan and policies what they need to know about its models.

A family is an entry point in ``edgevlm.families``, named after ``model_type``. Only :meth:`Family.parts` imports onnx.
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

BLOCKS, WIDENING, HEAD = 24, 4, 64  # a usual tower's number of blocks, MLP width / tower width, and head width
Config = Mapping[str, Any]
FrameSize = Callable[[int, tuple[int, int], int], tuple[int, int]]
"""A function of (factor, (fewest, most) pixels, frames that share them) that returns (height, width), multiples of factor."""


@dataclass(frozen=True, slots=True)
class TowerGeometry:
    """The sizes of a vision tower.

    ``group``: how many frames share a grid of tokens. ``tokens`` and ``text``: how many video tokens and text tokens each grid
    adds to the decoder's input. ``parameters``: how many numbers are stored, including the graph's constants. ``patches``: how
    many patches pass through the blocks. ``block_parameters``: the number of parameters of all blocks. ``projected``: how many
    rows pass through the projector. ``projector_parameters``: its number of parameters. ``attended``: how many keys a patch
    attends to on average. ``size``: a frame's (height, width) in pixels.
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
        """Return the number of decoder rows for a grid and the text around it."""
        return self.tokens + self.text

    @classmethod
    def estimated(cls, parameters: int, tokens: int, patches: int, size: tuple[int, int], **others: Any) -> TowerGeometry:
        """Estimate a tower's geometry from its number of parameters, assuming BLOCKS plain blocks with full attention."""
        width = max(1, round((parameters / (BLOCKS * (4 + 2 * WIDENING))) ** 0.5))
        return cls(
            parameters=parameters, block_parameters=parameters, projector_parameters=0, projected=tokens, tokens=tokens,
            patches=patches, attended=patches, blocks=BLOCKS, width=width, inner=WIDENING * width, heads=max(1, width // HEAD),
            size=size, **others,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FamilyParts:
    """The parts of a checkpoint's model, as :meth:`Family.parts` returns them."""

    vision: Tower  # pixels [G, group * 3, H, W] -> rows [G, tokens, width]
    grid: tuple[int, int]  # rows and columns of a frame's tokens
    closing: NDArray[np.float32] | None = None  # rows to append after a video, [n, hidden]
    tokens_per_second: float | None = None  # see VisionSpec
    deepstack: int = 0  # number of decoder layers that get DeepStack features from the tower
    longest_edge: int | None = None  # frames are first resized to this longest edge, then stretched
    pixels: PixelBudget | None = None  # allowed frame sizes, if the tower accepts more than one


class Family:
    """A model family. A subclass sets the attributes that differ and implements :meth:`parts`."""

    vision_type: ClassVar[str] = ""  # vision_config's own model_type, which early checkpoints lack
    content_type: ClassVar[str] = "video"  # the chat template's name for the content watched
    token_keys: ClassVar[tuple[str, ...]] = ("video_token_id", "video_token_index")  # config keys of the placeholder token
    processors: ClassVar[tuple[str, ...]] = ("video_processor", "image_processor")  # processors, in order of preference
    is_sized: ClassVar[bool] = False  # whether the processor's pixel budget determines the size of frames
    keeps_aspect: ClassVar[bool] = False  # whether frames keep the camera's aspect ratio
    positions: ClassVar[str] = "rows"  # how frames take positions: see VisionSpec
    before: ClassVar[str] = ""  # text before each frame, with {seconds}, {minutes}, {second} of its time; {frame} counts from 1
    after: ClassVar[str] = ""  # text after each frame
    opening: ClassVar[str] = ""  # text before the first frame, added by the processor, not by the template
    ending: ClassVar[str] = ""  # text after the last frame, added by the processor, not by the template
    placeholder: ClassVar[str] = ""  # what the chat template writes for a video, if not the placeholder token
    around: ClassVar[tuple[str, str]] = ("", "")  # the template's text around the video, repeated in ``before`` and ``after``
    text_tokens: ClassVar[int] = 0  # tokens of ``before`` and ``after`` with a four-digit time
    closing_rows: ClassVar[int] = 0
    merge: ClassVar[int] = 1  # a token is made from merge x merge patches
    fading: ClassVar[tuple[str, str]] = FADING  # HERMES's k and omega: see DecoderSpec
    tokenizer_class: ClassVar[str | None] = ""  # tokenizer class if no file names one; None: as saved
    backbone: ClassVar[Backbone | None] = None  # the decoder's traits; None: those of ``text_config.model_type``
    template: ClassVar[str] = ""  # the chat template, if transformers' processor has a built-in one for videos

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        """Return the parts for frames of ``camera`` (height, width). Raises UserError if the checkpoint cannot be exported."""
        raise NotImplementedError

    def geometry(self, config: Config, sized: FrameSize) -> TowerGeometry:
        """Return the sizes of the tower for ``edgevlm plan``. ``config``: ``config.json`` with transformers' defaults added."""
        from edgevlm.export.checkpoint import DeclaredOnly
        from edgevlm.export.vision import tower_parameters

        checkpoint = DeclaredOnly(config)
        tower = self.parts(checkpoint, (480, 640)).vision
        rows, columns = tower.patch_grid
        number = tower_parameters(tower, checkpoint)
        text = self.text_tokens
        return TowerGeometry.estimated(number, tower.tokens, rows * columns, tower.size, group=tower.group, text=text)

    def patches(self, vision: VisionSpec) -> int:
        """Return the number of patches in a bundle's frame grid."""
        return vision.tokens_per_frame * self.merge**2


def load_family(model_type: str, where: object) -> Family:
    """Return the family for a ``model_type`` or ``./file.py:Class``. The error for an unknown type begins with ``where``."""
    if not is_file(model_type) and model_type not in (known := names("families")):
        raise UserError(f"{where}: model type {model_type!r} is not supported, only {', '.join(known)}")
    family: Family = load_class("families", model_type)()
    return family


def block_parameters(width: int, inner: int, gated: bool = False) -> int:
    """Return the number of parameters in a tower's block: q, k, v, o and an MLP of two or three matrices, with biases."""
    mlp = (3 if gated else 2) * width * inner + (2 * inner if gated else inner) + width
    return 4 * (width * width + width) + mlp


def square_geometry(
    vision: Config, blocks: int, projector: int, projected: int, tokens: int, *, text: int = 0, more: int = 0
) -> TowerGeometry:
    """Return the geometry of a SigLIP or CLIP tower that uses its first ``blocks`` blocks. ``more``: additional parameters."""
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

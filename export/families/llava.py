"""The families LLaVA, LLaVA-NeXT-Video and LLaVA-OneVision: a CLIP or SigLIP tower, and no text between frames."""

from __future__ import annotations

import math
from typing import ClassVar

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import Config, Family, FamilyParts, FrameSize, TowerGeometry, square_geometry
from edgevlm.runtime.bundle import VisionSpec

PATCH = 14  # a patch's edge in pixels, in every CLIP and SigLIP tower of the published LLaVA models


class Llava(Family):
    """LLaVA: every patch of a frame is a token."""

    content_type: ClassVar[str] = "image"
    token_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "image_token_index")
    processors: ClassVar[tuple[str, ...]] = ("image_processor",)
    tokenizer_class: ClassVar[str | None] = None

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.square import SquareTower

        vision = SquareTower(checkpoint)
        return FamilyParts(vision, (vision.side, vision.side))

    def pooled(self, side: int, config: Config) -> tuple[int, int]:
        """Return how many rows of a frame enter the projector, and how many tokens a frame has. ``side``: the number of patches
        along an edge.
        """
        return side**2, side**2

    def patches(self, vision: VisionSpec) -> int:
        height, width = vision.size
        return max(1, height // PATCH) * max(1, width // PATCH)

    def geometry(self, config: Config, sized: FrameSize) -> TowerGeometry:
        vision, hidden = config["vision_config"], int(config["text_config"]["hidden_size"])
        width, depth = int(vision["hidden_size"]), int(vision["num_hidden_layers"])
        chosen = config["vision_feature_layer"]
        chosen = [index % (depth + 1) for index in (chosen if isinstance(chosen, list) else [chosen])]
        bias = 2 * hidden if config.get("multimodal_projector_bias", True) else 0
        projector = width * len(chosen) * hidden + hidden * hidden + bias
        projected, tokens = self.pooled(int(vision["image_size"]) // int(vision["patch_size"]), config)
        return square_geometry(vision, max(chosen), projector, projected, tokens)


class LlavaNextVideo(Llava):
    """LLaVA-NeXT-Video: CLIP rows are pooled before the projector."""

    content_type = Family.content_type
    token_keys = Family.token_keys
    processors = Family.processors
    tokenizer_class = Family.tokenizer_class

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.layers import averaging
        from edgevlm.export.vision.square import SquareTower

        config, vision = checkpoint.config, SquareTower(checkpoint)
        if (mode := config.get("spatial_pool_mode", "average")) != "average":
            raise UserError(f"config.json: spatial_pool_mode {mode!r} is not supported, only 'average'")
        means = averaging(vision.side, int(config.get("spatial_pool_stride", 2)))
        vision.before, few = means, len(means)
        vision.tokens, vision.reach = few**2, (means, means)
        return FamilyParts(vision, (few, few))

    def pooled(self, side: int, config: Config) -> tuple[int, int]:
        tokens = (side // int(config.get("spatial_pool_stride", 2))) ** 2
        return tokens, tokens


class LlavaOnevision(LlavaNextVideo):
    """LLaVA-OneVision: SigLIP rows are pooled 2 x 2 bilinearly after the projector. One newline row follows the video."""

    closing_rows: ClassVar[int] = 1

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.layers import bilinear
        from edgevlm.export.vision.square import SquareTower

        vision = SquareTower(checkpoint)
        few = math.ceil(vision.side / 2)
        vision.after = matrix = bilinear(vision.side, few)
        vision.tokens, vision.reach = few**2, (matrix, matrix)
        return FamilyParts(vision, (few, few), closing=checkpoint.tensor("image_newline", (vision.width,))[None])

    def pooled(self, side: int, config: Config) -> tuple[int, int]:
        return side**2, math.ceil(side / 2) ** 2

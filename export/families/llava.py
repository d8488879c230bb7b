"""LLaVA, LLaVA-NeXT-Video and LLaVA-OneVision: a CLIP or SigLIP tower, its rows pooled or not, nothing between frames."""

from __future__ import annotations

import math
from typing import ClassVar

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import Config, Family, FamilyParts, FrameSize, TowerGeometry, block_parameters, square_geometry
from edgevlm.runtime.bundle import VisionSpec

PATCH = 14  # pixels, of every CLIP and SigLIP tower that LLaVA is published with


class Llava(Family):
    """Every patch of a frame is a token."""

    content_type: ClassVar[str] = "image"
    token_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "image_token_index")
    processors: ClassVar[tuple[str, ...]] = ("image_processor",)

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.square import SquareTower

        vision = SquareTower(checkpoint)
        return FamilyParts(vision, (vision.side, vision.side))

    def pooled(self, side: int, config: Config) -> tuple[int, int]:
        """Rows that the projector takes of ``side`` x ``side`` patches, and tokens that come of them."""
        return side**2, side**2

    def patches(self, vision: VisionSpec) -> int:
        height, width = vision.size
        return max(1, height // PATCH) * max(1, width // PATCH)

    def geometry(self, config: Config, sized: FrameSize) -> TowerGeometry:
        vision, text = config["vision_config"], config["text_config"]
        width, inner, patch = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "patch_size"))
        side, depth, hidden = int(vision["image_size"]) // patch, int(vision["num_hidden_layers"]), int(text["hidden_size"])
        chosen = config["vision_feature_layer"]
        chosen = [index % (depth + 1) for index in (chosen if isinstance(chosen, list) else [chosen])]
        is_clip = vision["model_type"] == "clip_vision_model"
        blocks, patches = max(chosen), side * side + is_clip
        embedding = 3 * patch * patch * width + patches * width + (3 * width if is_clip else width)
        bias = 2 * hidden if config.get("multimodal_projector_bias", True) else 0
        projector = width * len(chosen) * hidden + hidden * hidden + bias
        projected, tokens = self.pooled(side, config)
        parameters = embedding + blocks * (block_parameters(width, inner) + 4 * width) + projector
        return square_geometry(
            vision, parameters, blocks, patches, projector_parameters=projector, projected=projected, tokens=tokens
        )


class LlavaNextVideo(Llava):
    """CLIP rows are pooled before the projector."""

    content_type = Family.content_type
    token_keys = Family.token_keys
    processors = Family.processors

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.layers import VisionGraph, averaging
        from edgevlm.export.vision.square import SquareTower

        config, vision = checkpoint.config, SquareTower(checkpoint)
        mode, stride = config.get("spatial_pool_mode", "average"), int(config.get("spatial_pool_stride", 2))
        if mode not in ("average", "max"):
            raise UserError(f"config.json: spatial_pool_mode {mode!r} cannot be exported; 'average' and 'max' can")
        side, few = vision.side, vision.side // stride

        def pool(g: VisionGraph, rows: str, width: int) -> str:
            if mode == "max":
                return g.max_pool("pooled", rows, width, side, stride)
            return g.resample("pooled", rows, width, averaging(side, stride))

        vision.before, vision.tokens, vision.reach = pool, few**2, (averaging(side, stride),) * 2
        return FamilyParts(vision, (few, few))

    def pooled(self, side: int, config: Config) -> tuple[int, int]:
        tokens = (side // int(config.get("spatial_pool_stride", 2))) ** 2
        return tokens, tokens


class LlavaOnevision(LlavaNextVideo):
    """SigLIP rows are pooled 2 x 2 bilinearly behind the projector; one newline row closes the video."""

    closing_rows: ClassVar[int] = 1

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.layers import bilinear
        from edgevlm.export.vision.square import SquareTower

        vision = SquareTower(checkpoint)
        few = math.ceil(vision.side / 2)
        vision.after = lambda g, rows, width: g.resample("pooled", rows, width, bilinear(vision.side, few))
        vision.tokens, vision.reach = few**2, (bilinear(vision.side, few),) * 2
        return FamilyParts(vision, (few, few), closing=checkpoint.tensor("image_newline", (vision.width,))[None])

    def pooled(self, side: int, config: Config) -> tuple[int, int]:
        return side**2, math.ceil(side / 2) ** 2

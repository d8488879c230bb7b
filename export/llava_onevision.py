"""LLaVA-OneVision watching a video: SigLIP rows pooled 2 x 2 bilinearly, and one newline row that closes the video."""

from __future__ import annotations

import math

import torch
from torch import nn

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.family import FamilyParts
from edgevlm.export.towers import TowerFeatures


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    hidden = int(checkpoint.section("text_config")["hidden_size"])
    vision = TowerFeatures(checkpoint)
    side = vision.side
    pooled = math.ceil(side / 2)

    def pool(rows: torch.Tensor) -> torch.Tensor:
        """``[F, side * side, hidden]`` to ``[F, pooled * pooled, hidden]``, as transformers' ``apply_pooling``."""
        grid = rows.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        small = nn.functional.interpolate(grid, size=(pooled, pooled), mode="bilinear")
        return small.permute(0, 2, 3, 1).flatten(1, 2)

    vision.after = pool
    return FamilyParts(
        vision=vision,
        grid=(pooled, pooled),
        closing=checkpoint.tensor("image_newline", (hidden,))[None],
        content_type="video",
        token_keys=("video_token_id", "video_token_index"),
        processors=("video_processor", "image_processor"),
    )

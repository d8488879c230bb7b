"""LLaVA-NeXT-Video watching a video: CLIP rows pooled before the projector, nothing between or after frames."""

from __future__ import annotations

import torch
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.family import FamilyParts
from edgevlm.export.towers import TowerFeatures

POOLS = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    mode, stride = checkpoint.config.get("spatial_pool_mode", "average"), int(checkpoint.config.get("spatial_pool_stride", 2))
    if mode not in POOLS:
        raise UserError(f"config.json: spatial_pool_mode {mode!r} cannot be exported; {' and '.join(map(repr, POOLS))} can")
    vision, pool = TowerFeatures(checkpoint), POOLS[mode](stride, stride)

    def pooled(rows: torch.Tensor) -> torch.Tensor:
        """``[F, side * side, width]`` to ``[F, (side // stride) ** 2, width]``."""
        grid = rows.unflatten(1, (vision.side, vision.side)).permute(0, 3, 1, 2)
        small: torch.Tensor = pool(grid)
        return small.flatten(2).transpose(1, 2)

    vision.before = pooled
    return FamilyParts(
        vision=vision,
        grid=(vision.side // stride, vision.side // stride),
        closing=None,
        content_type="video",
        token_keys=("video_token_id", "video_token_index"),
        processors=("video_processor", "image_processor"),
    )

"""LLaVA with a CLIP or SigLIP tower: every patch of a frame is a token, no pooling, nothing between or after frames."""

from __future__ import annotations

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.family import FamilyParts
from edgevlm.export.towers import TowerFeatures


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    vision = TowerFeatures(checkpoint)
    return FamilyParts(
        vision=vision,
        grid=(vision.side, vision.side),
        closing=None,
        content_type="image",
        token_keys=("image_token_id", "image_token_index"),
        processors=("image_processor",),
    )

"""LLaVA with a SigLIP tower: every patch of a frame is a token, no pooling, nothing between or after frames."""

from __future__ import annotations

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.family import FamilyParts
from edgevlm.export.vision import SiglipFeatures


def parts(checkpoint: Checkpoint) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    vision = SiglipFeatures(checkpoint)
    return FamilyParts(
        vision=vision,
        grid=(vision.side, vision.side),
        closing=None,
        content_type="image",
        token_keys=("image_token_id", "image_token_index"),
        processors=("image_processor",),
    )

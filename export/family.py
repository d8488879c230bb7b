"""What a model family says about itself; everything else of an export is the same for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.export.vision import SiglipFeatures


@dataclass(frozen=True, slots=True)
class FamilyParts:
    """The parts of a checkpoint that only its family knows."""

    vision: SiglipFeatures  # pixels [F, 3, H, W] -> rows [F, tokens, hidden]
    grid: tuple[int, int]  # rows and columns of a frame's tokens
    closing: NDArray[np.float32] | None  # rows that close a video, [n, hidden]
    content_type: str  # the chat template's word for what is watched
    token_keys: tuple[str, ...]  # config keys of the placeholder's token id, newest first
    processors: tuple[str, ...]  # sections and files that say how a frame is prepared, best first

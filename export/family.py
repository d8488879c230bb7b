"""What a model family says about itself; everything else of an export is the same for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.export.vision import VisionFeatures


@dataclass(frozen=True, slots=True)
class FamilyParts:
    """The parts of a checkpoint that only its family knows."""

    vision: VisionFeatures  # pixels [G, group * 3, H, W] -> rows [G, tokens, width]
    grid: tuple[int, int]  # rows and columns of a frame's tokens
    closing: NDArray[np.float32] | None  # rows that close a video, [n, hidden]
    content_type: str  # the chat template's word for what is watched
    token_keys: tuple[str, ...]  # config keys of the placeholder's token id, newest first
    processors: tuple[str, ...]  # sections and files that say how a frame is prepared, best first
    positions: str = "rows"  # how frames take positions: see VisionSpec
    tokens_per_second: float | None = None
    before: str = ""  # text around each frame
    after: str = ""
    deepstack: int = 0  # decoder layers that the tower gives features for, beside the embeddings
    placeholder: str = ""  # what the chat template writes for a video, where that is not the placeholder's token
    around: tuple[str, str] = ("", "")  # what it writes beside that and the frames bring themselves
    opening: str = ""  # text that the processor, not the template, puts before the first frame,
    ending: str = ""  # and after the last
    template: str = ""  # used where the checkpoint's own writes no place for a video
    longest_edge: int | None = None  # frames are first resized to, before they are stretched
    is_sized: bool = False  # whether the frame's size is worked out already, from the processor's pixel budget

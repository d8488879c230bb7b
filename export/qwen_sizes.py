"""How large Qwen's processors make a frame: whole squares of patches, within a pixel budget, near the aspect of the source."""

from __future__ import annotations

import math
from typing import Any

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.frames import processor

MOST_TOKENS = 768  # of a frame, as the authors' own preparation caps it


def frame_size(
    checkpoint: Checkpoint,
    processors: tuple[str, ...],
    camera: tuple[int, int],
    factor: int,
    budget: tuple[int, int],
    clip: int,
) -> tuple[int, int]:
    """(height, width) of frames that come as ``camera`` = (height, width), both multiples of ``factor`` pixels.

    budget: the fewest and the most pixels, where the processor files name none. clip: frames that share a budget, 1 where each
    has its own; a stream has no length, so a budget for a clip is that of the shortest, with MOST_TOKENS a frame at most.
    Raises UserError for sizes that are none.
    """
    file, config = processor(checkpoint, processors)
    size: dict[str, Any] = config.get("size") or {}
    fewest = int(config.get("min_pixels") or size.get("shortest_edge") or budget[0])
    most = int(config.get("max_pixels") or size.get("longest_edge") or budget[1])
    if clip > 1:
        most = max(min(MOST_TOKENS * factor**2, most // clip), int(fewest * 1.05)) * clip
    height, width = camera
    if min(camera) < 1 or max(camera) > 200 * min(camera):
        raise UserError(f"frames of {width} x {height} pixels cannot be used; give a size whose sides differ 200-fold at most")
    if not 0 < fewest <= most:
        raise UserError(f"{file}: a budget of {fewest} to {most} pixels is none")
    return fitted(height, width, factor, fewest, most, clip)


def fitted(height: int, width: int, factor: int, fewest: int, most: int, clip: int = 1) -> tuple[int, int]:
    """The nearest multiples of ``factor``; scaled down or up together where ``clip`` such frames pass the pixel budget."""
    if clip > 1 and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    tall, wide = (round(side / factor) * factor for side in (height, width))
    if clip * tall * wide > most:
        shrink = math.sqrt(clip * height * width / most)
        return _multiples(height / shrink, width / shrink, factor, math.floor)
    if clip * tall * wide < fewest:
        grow = math.sqrt(fewest / (clip * height * width))
        return _multiples(height * grow, width * grow, factor, math.ceil)
    return tall, wide


def _multiples(height: float, width: float, factor: int, rounded: Any) -> tuple[int, int]:
    tall, wide = (max(factor, int(rounded(side / factor)) * factor) for side in (height, width))
    return tall, wide

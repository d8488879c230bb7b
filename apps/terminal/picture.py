"""A frame as a terminal shows it: two colours a character cell, or grey characters without colours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.run.frame_preparation import cell_means

Image = NDArray[np.uint8]
GREYS = " .:-=+*#%@"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a terminal can show. ``colors``: 2, 256 or 2**24."""

    unicode: bool = True
    colors: int = 2**24


def capabilities(environment: Mapping[str, str] = os.environ, encoding: str = "utf-8") -> Capabilities:
    """Read the environment: NO_COLOR, COLORTERM and the encoding."""
    try:
        "▀█░✓·".encode(encoding)
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    colors = 2 if environment.get("NO_COLOR") else 2**24 if environment.get("COLORTERM") in ("truecolor", "24bit") else 256
    return Capabilities(unicode, colors)


def fit(image: Image, columns: int, rows: int) -> tuple[int, int]:
    """Return the columns and rows of cells, twice as high as wide, that show an image undistorted within those given."""
    height, width = image.shape[:2]
    scale = min(columns / width, 2 * rows / height)
    return max(1, round(width * scale)), max(1, round(height * scale / 2))


def draw(image: Image, columns: int, rows: int, able: Capabilities) -> list[str]:
    """Return ``rows`` lines of ``columns`` cells, with escape sequences for their colours."""
    if able.colors == 2 or not able.unicode:
        grey = cell_means(image, rows, columns).mean(axis=2)
        return ["".join(GREYS[int(value) * len(GREYS) // 256] for value in line) for line in grey]
    pixels = cell_means(image, 2 * rows, columns).round().astype(int)
    if able.colors == 256:
        codes = np.char.add("5;", (16 + pixels * 6 // 256 @ [36, 6, 1]).astype(str)).tolist()
    else:
        codes = [["2;" + ";".join(map(str, pixel)) for pixel in line] for line in pixels.tolist()]
    pairs = (zip(upper, lower, strict=True) for upper, lower in zip(codes[::2], codes[1::2], strict=True))
    return ["".join(f"\x1b[38;{top};48;{bottom}m▀" for top, bottom in line) + "\x1b[0m" for line in pairs]

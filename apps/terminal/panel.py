"""Draw the panel above the prompt: the picture and the memory's content or, in the demo, three memories."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prompt_toolkit.utils import get_cwidth

from edgevlm.apps.run.change_gate import cell_means
from edgevlm.apps.run.memory_view import LaneView, MemoryView

Image = NDArray[np.uint8]
Line = list[tuple[str, str]]  # style and text, as in prompt_toolkit

TALL = 14
LEVELS = "·░▒▓█"  # shades from empty to full


class Panel(NamedTuple):
    """The panel's lines. The upper left ``columns`` x ``rows`` cells stay blank for the image."""

    lines: list[Line]
    columns: int = 0
    rows: int = 0


def make_panel(view: Sequence[LaneView], image: Image | None, columns: int, lines: int) -> Panel:
    """Draw the memory's content, next to the newest frame if there is room."""
    lines = min(lines, TALL)
    wide, high = fit(image, columns * 2 // 5, lines) if image is not None and lines >= 6 and columns >= 60 else (0, 0)
    right = columns - wide - 2 if wide else columns
    rows = _lanes(view, right, lines) if len(view) > 1 else _memory(view[0].memory, right)
    rows = [*rows[:lines], *([] for _ in range(high - len(rows)))]
    return Panel([[("", " " * (columns - right)), *line] for line in rows], wide, high)


def _memory(memory: MemoryView, columns: int) -> list[Line]:
    """Return lines that show how full the memory is and which frames it holds."""
    numbers = f" {memory.tokens:,} of {memory.budget:,} tokens" if columns >= 40 else f" {memory.tokens:,}"
    bar = gauge(memory.tokens / memory.budget, max(4, columns - 7 - len(numbers)))
    return [
        [("", "memory "), ("class:gauge", bar), ("class:dim", numbers)],
        [("", "holds  "), ("class:held", timeline(memory, columns - 7))],
    ]


def _lanes(view: Sequence[LaneView], columns: int, lines: int) -> list[Line]:
    """Return lines that show each memory's name, how full it is, its score and, if there is room, the frames it holds."""
    rows: list[Line] = []
    for lane in view:
        knows = f"knows {lane.right} of {lane.asked}" if lane.asked else "not asked yet"
        well, badly = lane.right > 0.7 * lane.asked, lane.right < 0.5 * lane.asked
        style = "class:right" if well else "class:wrong" if badly else "" if lane.asked else "class:dim"
        name = lane.name[:18].ljust(19) if columns >= 50 else lane.name.split(":")[0][:14].ljust(15)
        used, full, tokens = lane.memory.tokens / lane.memory.budget, "class:gauge", f" {lane.memory.tokens:,} tokens"
        if lane.stopped_s is not None:
            used, full, tokens = 1.0, "class:wrong", f" full {clock(lane.stopped_s)}"
        elif columns < 60:
            tokens = ""
        bar = gauge(used, max(0, columns - len(name) - len(tokens) - len(knows) - 3))
        rows.append([("bold", name), (full, bar), ("class:dim", tokens), (style, f"  {knows}")])
        if lines >= 2 * len(view):
            rows.append([("class:dim", "  holds "), ("class:held", timeline(lane.memory, columns - 9))])
    return rows


def gauge(used: float, width: int) -> str:
    """Return a bar of ``width`` cells, filled to the fraction ``used`` (0 to 1)."""
    filled = min(width, round(used * width))
    return LEVELS[-1] * filled + LEVELS[1] * (width - filled)


def timeline(memory: MemoryView, width: int) -> str:
    """Return a strip of all watched frames, the newest at the right; frames with more tokens in memory are darker."""
    if not memory.watched or width < 1:
        return ""
    width = min(width, memory.watched)
    cells = np.minimum(memory.frames * width // memory.watched, width - 1)
    held = np.bincount(cells, memory.fractions, minlength=width) * width / memory.watched
    levels = np.minimum(np.ceil(held * 4 - 1e-9), 4).astype(int)
    return "".join(LEVELS[level] for level in levels)


def fit(image: Image, columns: int, rows: int) -> tuple[int, int]:
    """Return the largest size, in columns and rows, at which an image fits. A cell is twice as high as wide."""
    height, width = image.shape[:2]
    scale = min(columns / width, 2 * rows / height)
    return max(1, round(width * scale)), max(1, round(height * scale / 2))


def draw(image: Image, columns: int, rows: int, true_color: bool) -> list[str]:
    """Return ``rows`` lines of ``columns`` half blocks, with escape sequences for 2**24 or 256 colours."""
    pixels = cell_means(image, 2 * rows, columns).round().astype(int)
    if true_color:
        codes = [["2;" + ";".join(map(str, pixel)) for pixel in line] for line in pixels.tolist()]
    else:
        codes = np.char.add("5;", (16 + pixels * 6 // 256 @ [36, 6, 1]).astype(str)).tolist()
    pairs = (zip(upper, lower, strict=True) for upper, lower in zip(codes[::2], codes[1::2], strict=True))
    return ["".join(f"\x1b[38;{top};48;{bottom}m▀" for top, bottom in line) + "\x1b[0m" for line in pairs]


def draw_plain(image: Image, columns: int, rows: int) -> list[str]:
    """Draw the image in ``rows`` lines of ``columns`` characters, which are denser where it differs from its background."""
    cells = cell_means(image, rows, columns)
    differs = np.abs(cells - np.median(cells, axis=(0, 1))).max(axis=2)
    levels = differs / max(differs.max(), 1) * (len(LEVELS) - 1)
    return ["".join(LEVELS[level] for level in line) for line in levels.round().astype(int).tolist()]


def wrap(line: Line, columns: int) -> list[Line]:
    lines: list[Line] = [[]]
    left = columns
    for style, text in line:
        for word in re.findall(r"\s*\S+|\s+$", text):
            if "\n" in word or (left < columns and get_cwidth(word) > left):
                lines.append([])
                left, word = columns, word.lstrip()
            lines[-1].append((style, word))
            left -= get_cwidth(word)
    return lines


def whole_fields(status: str, columns: int) -> str:
    """Shorten a status line to ``columns`` by dropping whole fields from its right end."""
    while len(status) > columns and " · " in status:
        status = status.rpartition(" · ")[0]
    return status[:columns]


def clock(seconds: float) -> str:
    """Format seconds as ``1:05`` or ``2:00:00``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"

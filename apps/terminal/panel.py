"""The panel above the prompt: the picture, the memory, and in the demo what three memories still know."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.run.comparison import ComparisonView, Lane
from edgevlm.apps.run.frame_preparation import cell_means
from edgevlm.apps.run.memory_view import MemoryView, StripView

Image = NDArray[np.uint8]
Line = list[tuple[str, str]]  # style and text, as prompt_toolkit has them

WIDE = 100  # columns from which lanes stand side by side
TALL = 14  # lines of a panel at most
FACT = 30  # columns of an object's name and where it was
ACROSS, DOWN = 8, 2  # columns and lines of a frame in a strip
LEVELS = "·░▒▓█"  # from nothing to all


class PlacedImage(NamedTuple):
    """An image over some cells of a panel; ``x``, ``y``: its upper left one."""

    x: int
    y: int
    columns: int
    rows: int
    image: Image


class Panel(NamedTuple):
    """Lines of text, which are blank where an image goes."""

    lines: list[Line]
    images: list[PlacedImage]


def comparison_panel(view: ComparisonView, image: Image, columns: int, lines: int, pictures: bool = True) -> Panel:
    """Draw the demo: lanes side by side from WIDE columns on, else below one another."""
    lines, is_table = min(lines, TALL), columns >= WIDE and lines >= 8
    most = (28 if not WIDE <= columns < 115 else 20) if pictures and lines >= 8 and columns >= 70 else 0
    images = [PlacedImage(0, 0, *fit(image, most, lines), image)] if most else []
    right = columns - (images[0].columns + 2 if images else 0)
    return _beside(images, _table(view, right, lines) if is_table else _stacked(view, right, lines))


def watching_panel(view: StripView, image: Image, columns: int, lines: int, pictures: bool = True) -> Panel:
    """Draw a camera or a file: the newest frame, the budget, and frames that are still held and that were just forgotten."""
    lines, memory = min(lines, TALL), view.memory
    images = []
    if pictures and lines >= 6 and columns >= 60:
        images = [PlacedImage(0, 0, *fit(image, min(columns * 2 // 5, 48), lines), image)]
    left = images[0].columns + 2 if images else 0
    right = columns - left - 1
    numbers = f" {memory.tokens:,} of {memory.budget:,} tokens" if right >= 40 else f" {memory.tokens:,}"
    bar = ("class:gauge", gauge(memory.tokens / memory.budget, max(4, right - 7 - len(numbers))))
    rows: list[Line] = [
        [("", "memory "), bar, ("class:dim", numbers)],
        [("", "holds  "), ("class:held", timeline(memory, right - 7))],
    ]
    for title, frames in (("still held", view.held), ("just forgotten", view.forgotten)):
        if not images or not frames or len(rows) + DOWN + 2 > lines:
            continue
        fitting = min((right + 1) // (ACROSS + 1), len(frames))
        chosen = [frames[place] for place in np.unique(np.linspace(0, len(frames) - 1, fitting).astype(int))]
        for place, (_, number) in enumerate(chosen):
            if (thumbnail := view.image(int(number))) is not None:
                images.append(PlacedImage(left + place * (ACROSS + 1), len(rows) + 1, ACROSS, DOWN, thumbnail))
        times = "".join(clock(time_s).ljust(ACROSS + 1) for time_s, _ in chosen)
        rows += [[("class:dim", title)], *([] for _ in range(DOWN)), [("class:dim", times.rstrip())]]
    return _beside(images, rows)


def gauge(used: float, width: int) -> str:
    """A bar of ``width`` cells, ``used`` of it (0 to 1) filled."""
    filled = min(width, round(used * width))
    return LEVELS[-1] * filled + LEVELS[1] * (width - filled)


def timeline(memory: MemoryView, width: int) -> str:
    """Every frame watched, the first at the left and the newest at the right; darker where more of it is held."""
    if not memory.watched or width < 1:
        return ""
    width = min(width, memory.watched)
    cells = np.minimum(memory.frames * width // memory.watched, width - 1)
    held = np.bincount(cells, memory.fractions, minlength=width) * width / memory.watched
    levels = np.minimum(np.ceil(held * 4 - 1e-9), 4).astype(int)
    return "".join(LEVELS[level] for level in levels)


def fit(image: Image, columns: int, rows: int) -> tuple[int, int]:
    """Return the columns and rows of cells, twice as high as wide, that show an image undistorted within those given."""
    height, width = image.shape[:2]
    scale = min(columns / width, 2 * rows / height)
    return max(1, round(width * scale)), max(1, round(height * scale / 2))


def draw(image: Image, columns: int, rows: int, true_color: bool) -> list[str]:
    """Return ``rows`` lines of ``columns`` half blocks, with escape sequences for their colours, of 2**24 or 256."""
    pixels = cell_means(image, 2 * rows, columns).round().astype(int)
    if true_color:
        codes = [["2;" + ";".join(map(str, pixel)) for pixel in line] for line in pixels.tolist()]
    else:
        codes = np.char.add("5;", (16 + pixels * 6 // 256 @ [36, 6, 1]).astype(str)).tolist()
    pairs = (zip(upper, lower, strict=True) for upper, lower in zip(codes[::2], codes[1::2], strict=True))
    return ["".join(f"\x1b[38;{top};48;{bottom}m▀" for top, bottom in line) + "\x1b[0m" for line in pairs]


def clock(seconds: float) -> str:
    """``1:05`` or ``2:00:00``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def _beside(images: list[PlacedImage], rows: list[Line]) -> Panel:
    """Put text to the right of the first image, if there is one."""
    if not images:
        return Panel(rows, [])
    blank: list[Line] = [[] for _ in range(images[0].rows - len(rows))]
    return Panel([[("", " " * (images[0].columns + 2)), *line] for line in [*rows, *blank]], images)


def _table(view: ComparisonView, columns: int, lines: int) -> list[Line]:
    """Lanes side by side, and what each answers about objects that left."""
    width = (columns - FACT) // len(view.lanes)

    def row(label: str, cells: Line, style: str = "class:dim") -> Line:
        return [(style, label[: FACT - 1].ljust(FACT)), *((style, text[: width - 2].ljust(width)) for style, text in cells)]

    rows = [
        row("", [("bold", lane.name) for lane in view.lanes]),
        row("memory", [_bar(lane, width - 2) for lane in view.lanes]),
        row("", [("class:dim", _tokens(lane)) for lane in view.lanes]),
        row("still holds, frame by frame", [("class:held", timeline(lane.memory, width - 2)) for lane in view.lanes]),
        row("what left, and where it was", [_knows(lane, view) for lane in view.lanes]),
    ]
    for fact in view.facts[: lines - len(rows)]:
        answers = [(lane.answers.get(fact.question, "not asked yet"), fact.question in lane.answers) for lane in view.lanes]
        cells = [
            ("class:dim", text) if not asked else ("class:right", "✓") if text == fact.truth else ("class:wrong", f"✗ {text}")
            for text, asked in answers
        ]
        rows.append(row(f"{fact.name:<16}{fact.truth}", cells, ""))
    return rows


def _stacked(view: ComparisonView, columns: int, lines: int) -> list[Line]:
    """A line a lane, its name, gauge and score; and where they fit, one of the frames that it holds."""
    rows: list[Line] = []
    for lane in view.lanes:
        style, knows = _knows(lane, view)
        name = lane.name[:18].ljust(19) if columns >= 60 else lane.name.split(":")[0][:14].ljust(15)
        tokens = f" {_tokens(lane)}" if columns >= 60 or lane.stopped_s is not None else ""
        bar = max(0, columns - len(name) - len(tokens) - len(knows) - 3)
        rows.append([("bold", name), _bar(lane, bar), ("class:dim", tokens), (style, f"  {knows}")])
        if lines >= 2 * len(view.lanes):
            rows.append([("class:dim", "  holds "), ("class:held", timeline(lane.memory, columns - 9))])
    return rows[:lines]


def _bar(lane: Lane, width: int) -> tuple[str, str]:
    if lane.stopped_s is not None:
        return "class:wrong", gauge(1.0, width)
    return "class:gauge", gauge(lane.memory.tokens / lane.memory.budget, width)


def _tokens(lane: Lane) -> str:
    if lane.stopped_s is not None:
        return f"full {clock(lane.stopped_s)}"
    return f"{lane.memory.tokens:,} of {lane.memory.budget:,}"


def _knows(lane: Lane, view: ComparisonView) -> tuple[str, str]:
    asked = [(lane.answers[fact.question], fact.truth) for fact in view.facts if fact.question in lane.answers]
    right = sum(answer == truth for answer, truth in asked)
    if not asked:
        return "class:dim", "not asked yet"
    style = "class:right" if right > 0.7 * len(asked) else "class:wrong" if right < 0.5 * len(asked) else ""
    return style, f"knows {right} of {len(asked)}"

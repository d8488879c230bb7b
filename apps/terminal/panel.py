"""The panel above the prompt: the picture, the memory, and in the demo what three memories still know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgevlm.apps.run.comparison import ComparisonView, LaneView
from edgevlm.apps.run.memory_view import MemoryView, StripView
from edgevlm.apps.sources.base import Fact
from edgevlm.apps.terminal.picture import Capabilities, Image, fit

Line = list[tuple[str, str]]  # style and text, as prompt_toolkit has them

WIDE = 100  # columns from which lanes stand side by side
TALL = 14  # lines of a panel at most
PICTURE = 28  # columns of the demo's picture at most
FACT = 30  # columns of an object's name and where it was
THUMBNAIL = (8, 2)  # columns and lines of a frame in a strip


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image over some cells of a panel; ``x``, ``y``: its upper left one."""

    x: int
    y: int
    columns: int
    rows: int
    image: Image


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines of text, which are blank where an image goes."""

    lines: list[Line]
    images: list[PlacedImage]


@dataclass(frozen=True, slots=True)
class Signs:
    """The characters of gauges and marks."""

    full: str
    levels: str  # from nothing to all
    right: str
    wrong: str

    @classmethod
    def of(cls, able: Capabilities) -> Signs:
        return cls("█", "·░▒▓█", "✓", "✗") if able.unicode else cls("#", ".-+*#", "+", "-")


def gauge(used: float, width: int, signs: Signs) -> str:
    """A bar of ``width`` cells, ``used`` of it (0 to 1) filled."""
    filled = min(width, round(used * width))
    return signs.full * filled + signs.levels[1] * (width - filled)


def timeline(memory: MemoryView, width: int, signs: Signs) -> str:
    """Every frame watched, the first at the left and the newest at the right; darker where more of it is held."""
    if not memory.watched or width < 1:
        return ""
    width = min(width, memory.watched)
    cells = np.minimum(memory.frames * width // memory.watched, width - 1)
    held = np.bincount(cells, memory.fractions, minlength=width) * width / memory.watched
    last = len(signs.levels) - 1
    levels = np.minimum(np.ceil(held * last - 1e-9), last).astype(int)
    return "".join(signs.levels[level] for level in levels)


def comparison_panel(view: ComparisonView, image: Image, columns: int, lines: int, able: Capabilities) -> Panel:
    """Draw the demo: lanes side by side from WIDE columns on, else below one another; one line each in a low terminal."""
    signs, lines = Signs.of(able), min(lines, TALL)
    if columns >= WIDE and lines >= 8:
        wide, high = fit(image, PICTURE if columns >= 115 else 20, lines)
        return _beside(_side_by_side(view, columns - wide - 2, lines, signs), image, wide, high)
    if lines >= 9 and columns < 70:
        return Panel(_stacked(view, columns, lines, signs), [])
    if lines >= 9:
        wide, high = fit(image, PICTURE, lines)
        return _beside(_stacked(view, columns - wide - 2, lines, signs), image, wide, high)
    return Panel([_lane_line(lane, view, columns, signs) for lane in view.lanes][:lines], [])


def _beside(text: list[Line], image: Image, wide: int, high: int) -> Panel:
    rows = [*text, *([] for _ in range(high - len(text)))]
    return Panel([[("", " " * (wide + 2)), *line] for line in rows], [PlacedImage(0, 0, wide, high, image)])


def _side_by_side(view: ComparisonView, columns: int, lines: int, signs: Signs) -> list[Line]:
    width = (columns - FACT) // len(view.lanes)

    def row(label: str, cells: Sequence[tuple[str, str]], style: str = "class:dim") -> Line:
        return [(style, label[: FACT - 1].ljust(FACT)), *((style, text[: width - 2].ljust(width)) for style, text in cells)]

    bar = width - 2
    rows = [
        row("", [("bold", lane.name) for lane in view.lanes]),
        row("memory", [_bar(lane, bar, signs) for lane in view.lanes]),
        row("", [("class:dim", _tokens(lane, bar)) for lane in view.lanes]),
        row("still holds, frame by frame", [("class:held", timeline(lane.memory, bar, signs)) for lane in view.lanes]),
        row("what left, and where it was", [_knows(lane, view) for lane in view.lanes]),
    ]
    for fact in view.facts[: lines - len(rows)]:
        cells = [_mark(lane, fact, signs, spell=True) for lane in view.lanes]
        rows.append(row(f"{fact.name:<16}{fact.truth}", cells, ""))
    return rows


def _stacked(view: ComparisonView, columns: int, lines: int, signs: Signs) -> list[Line]:
    rows: list[Line] = []
    for lane in view.lanes:
        rows.append(_lane_line(lane, view, columns, signs))
        if lines >= 11:
            rows.append([("class:dim", "  holds "), ("class:held", timeline(lane.memory, columns - 9, signs))])
    names = [lane.name.split(":")[0].split()[-1][:6].ljust(7) for lane in view.lanes]
    label = columns - sum(map(len, names)) - 1
    title = "what left, and where it was" if label > FACT - 2 else "what left"
    rows.append([("class:dim", title.ljust(label)), ("class:dim", "".join(names))])
    for fact in view.facts[: lines - len(rows)]:
        said = f"{fact.name:<16}{fact.truth}" if label > FACT - 2 else fact.name
        marks = ((*_mark(lane, fact, signs), len(name)) for lane, name in zip(view.lanes, names, strict=True))
        rows.append([("", said[: label - 1].ljust(label)), *((style, text.ljust(width)) for style, text, width in marks)])
    return rows


def _lane_line(lane: LaneView, view: ComparisonView, columns: int, signs: Signs) -> Line:
    """Name, gauge and score in one line."""
    name = lane.name[:18].ljust(19) if columns >= 60 else lane.name.split(":")[0][:14].ljust(15)
    style, knows = _knows(lane, view)
    if lane.stopped_s is not None:
        return [("bold", name), ("class:wrong", _tokens(lane, columns - len(name) - len(knows) - 2)), (style, "  " + knows)]
    tokens = f" {lane.memory.tokens:,} tokens" if columns >= 60 else ""
    bar = max(4, columns - len(name) - len(tokens) - len(knows) - 3)
    return [("bold", name), _bar(lane, bar, signs), ("class:dim", tokens), (style, "  " + knows)]


def _bar(lane: LaneView, width: int, signs: Signs) -> tuple[str, str]:
    if lane.stopped_s is not None:
        return "class:wrong", gauge(1.0, width, signs)
    return "class:gauge", gauge(lane.memory.tokens / lane.memory.budget, width, signs)


def _tokens(lane: LaneView, width: int) -> str:
    """The longest wording that fits."""
    if lane.stopped_s is not None:
        since = clock(lane.stopped_s)
        texts = [f"full since {since}: sees nothing new", f"full since {since}", f"full {since}"]
    else:
        tokens, budget = lane.memory.tokens, lane.memory.budget
        texts = [f"{tokens:,} of {budget:,} tokens", f"{tokens:,}/{budget:,}"]
    return next((text for text in texts if len(text) <= width), texts[-1][: max(0, width)])


def _knows(lane: LaneView, view: ComparisonView) -> tuple[str, str]:
    asked = [(lane.answers[fact.question], fact.truth) for fact in view.facts if fact.question in lane.answers]
    right = sum(answer == truth for answer, truth in asked)
    if not asked:
        return ("class:wrong", "no longer answers") if lane.stopped_s is not None else ("class:dim", "not asked yet")
    style = "class:right" if right > 0.7 * len(asked) else "class:wrong" if right < 0.5 * len(asked) else ""
    return style, f"knows {right} of {len(asked)}"


def _mark(lane: LaneView, fact: Fact, signs: Signs, spell: bool = False) -> tuple[str, str]:
    answer = lane.answers.get(fact.question)
    if answer is None:
        return "class:dim", "" if not spell else "not asked yet" if lane.stopped_s is None else "no answer"
    if answer == fact.truth:
        return "class:right", signs.right
    return "class:wrong", f"{signs.wrong} {answer}" if spell else signs.wrong


def watching_panel(view: StripView, image: Image, columns: int, lines: int, able: Capabilities) -> Panel:
    """A camera or a file: the newest frame, the budget, and frames that are still held and that were just forgotten."""
    signs, lines = Signs.of(able), min(lines, TALL)
    wide, high = fit(image, min(columns * 2 // 5, 48), lines) if lines >= 6 and columns >= 60 else (0, 0)
    left = wide + 2 if wide else 0
    right = columns - left - 1
    memory = view.memory
    numbers = f" {memory.tokens:,} of {memory.budget:,} tokens" if right >= 40 else f" {memory.tokens:,}"
    rows: list[Line] = [
        [("", "memory "), ("class:gauge", gauge(memory.tokens / memory.budget, max(4, right - 7 - len(numbers)), signs)),
         ("class:dim", numbers)],
        [("", "holds  "), ("class:held", timeline(memory, right - 7, signs))],
    ]  # fmt: skip
    images = [PlacedImage(0, 0, wide, high, image)] if wide else []
    across, down = THUMBNAIL
    fitting = max(0, (right + 1) // (across + 1))
    for title, frames in (("still held", view.held), ("just forgotten", view.forgotten)):
        if not wide or not frames or len(rows) + down + 1 > lines:
            continue
        chosen = [frames[i] for i in np.unique(np.linspace(0, len(frames) - 1, min(fitting, len(frames))).astype(int))]
        rows.append([("class:dim", title)])
        for place, (_, number) in enumerate(chosen):
            if (thumbnail := view.image(int(number))) is not None:
                images.append(PlacedImage(left + place * (across + 1), len(rows), across, down, thumbnail))
        rows.extend([] for _ in range(down))
        times = "".join(clock(time_s).ljust(across + 1) for time_s, _ in chosen)
        if len(rows) < lines:
            rows.append([("class:dim", times.rstrip())])
    blank: list[Line] = [[] for _ in range(high - len(rows))]
    return Panel([[("", " " * left), *line] for line in [*rows[:lines], *blank]], images)


def clock(seconds: float) -> str:
    """``1:05`` or ``2:00:00``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"

"""Two runs, line by line: how many times worse each timed field is, and whether that is more than chance and a margin."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgevlm.bench.results.environment import difference
from edgevlm.bench.results.journal import Line, Run, number
from edgevlm.errors import UserError

OURS = "edgevlm"
WORDS_MEASURED = ("policy_used", "stopped", "skipped", "left_out", "error")  # strings that are results, not places
PLACE = (
    "threads", "frames", "context", "chunk", "held", "tokens_per_frame", "layers", "kv_heads", "head_dim", "hidden", "heads",
    "tokens", "budget", "batch", "seconds", "turns", "streams", "st_spattn_from", "inline", "realtime",
)  # fmt: skip
# a timed field, whether more of it is better, and the fields of its spread
TIMED: dict[str, tuple[bool, tuple[str, str] | None]] = {
    "ms_per_token": (False, ("low", "high")),
    "ms_per_frame": (False, ("low", "high")),
    "ratio": (False, ("low", "high")),
    "ttft_ms_p50": (False, ("ttft_ms_p50", "ttft_ms_p95")),
    "tpot_ms_p50": (False, ("tpot_ms_p50", "tpot_ms_p95")),
    "ms_p50": (False, ("ms_p50", "ms_p95")),
    "ttft_ms": (False, None),
    "ms": (False, ("low", "high")),
    "frame_ms": (False, ("frame_low", "frame_high")),
    "hold_ms": (False, ("hold_low", "hold_high")),
    "write_ms": (False, ("write_low", "write_high")),
    "dense_ms": (False, None),
    "st_spattn_ms": (False, None),
    "joules_per_frame": (False, None),
    "joules_per_token": (False, None),
    "fps": (True, ("fps_low", "fps_high")),
    "fps_ratio": (True, ("low", "high")),
    "tokens_ratio": (True, ("tokens_low", "tokens_high")),
}

Place = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """``worse``: how many times worse the new median is; apart: the spreads do not overlap, or there are none."""

    place: Place
    field: str
    new: float
    old: float
    worse: float
    apart: bool

    def fails(self, margin: float) -> bool:
        """More than ``margin`` worse, 0.2 being 20 %, and not by chance."""
        return self.worse > 1 + margin and self.apart

    def line(self, margin: float) -> dict[str, Any]:
        return {
            **dict(self.place), "field": self.field, "new": self.new, "old": self.old, "times_worse": round(self.worse, 4),
            "spreads_apart": self.apart, "fails": self.fails(margin),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """only_new, only_old: lines that the other run has not."""

    changes: list[Change]
    only_new: int
    only_old: int


def compare(new: Run, old: Run, *, force: bool = False) -> Comparison:
    """Timed fields of lines that both have. Raises UserError for two machines, unless forced, and without a common line."""
    if not force and (apart := difference(new.section("machine"), old.section("machine"))):
        raise UserError(f"{new.id} and {old.id} cannot be compared ({apart}); --force does it all the same")
    ours, theirs = _placed(new.lines), _placed(old.lines)
    common = [place for place in ours if place in theirs]
    if not common:
        raise UserError(f"{new.id} and {old.id} have no line in common: run the same commands")
    changes = [change for place in common for change in _changes(place, ours[place], theirs[place])]
    return Comparison(changes, len(ours) - len(common), len(theirs) - len(common))


def margin_of(text: str) -> float:
    """``20%`` as 0.2. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not found:
        raise UserError(f"--fail-over {text!r}: give percent, such as 20%")
    return float(found[1]) / 100


def table(comparison: Comparison, margin: float) -> Iterator[str]:
    """Lines of text: a change each, worst first, then how many there are."""
    for change in sorted(comparison.changes, key=lambda change: -change.worse):
        mark = "WORSE" if change.fails(margin) else "chance" if change.worse > 1 + margin else ""
        yield f"{change.worse:>7.2f}  {change.field:<17}{change.new:>12.3f}{change.old:>12.3f}  {mark:<7}{said(change.place)}"
    failed = sum(change.fails(margin) for change in comparison.changes)
    yield (
        f"{len(comparison.changes)} figures compared, {failed} worse by more than {100 * margin:g} %; lines in one alone: "
        f"{comparison.only_new} new, {comparison.only_old} old"
    )


def said(place: Place) -> str:
    """The bench, other names, then numbers with what they count."""
    named = [(key, value) for key, value in place if key not in ("nth", "bench")]
    names = [value for key, value in named if isinstance(value, str)]
    counts = [f"{key.replace('_', ' ')} {value}" for key, value in named if not isinstance(value, str)]
    return " ".join([str(dict(place).get("bench", "")), *names, *counts])


def place_of(line: Line) -> Place:
    """What a line is about, apart from what was measured."""
    return tuple(
        sorted(
            (key, value)
            for key, value in line.items()
            if (isinstance(value, str) and key not in WORDS_MEASURED) or (key in PLACE and isinstance(value, int | float))
        )
    )


def _placed(lines: Sequence[Line]) -> dict[Place, Line]:
    """Lines of ours by place; those of one place are told apart by their order."""
    seen, placed = Counter[Place](), dict[Place, Line]()
    for line in lines:
        if line.get("runtime", OURS) == OURS:
            place = place_of(line)
            key = (*place, ("nth", seen[place]))
            placed[key] = line
            seen[place] += 1
    return placed


def _changes(place: Place, new: Line, old: Line) -> Iterator[Change]:
    for name, (more_is_better, spread) in TIMED.items():
        one, other = number(new, name), number(old, name)
        if one is None or other is None or one <= 0 or other <= 0 or (name, new.get("bench")) == ("ratio", "prefill-pattern"):
            continue
        worse = other / one if more_is_better else one / other
        yield Change(place, name, one, other, worse, _apart(new, old, spread))


def _apart(new: Line, old: Line, spread: tuple[str, str] | None) -> bool:
    if spread is None:
        return True
    bounds = [number(line, name) for line in (new, old) for name in spread]
    if any(bound is None for bound in bounds):
        return True
    low, high, old_low, old_high = (float(bound or 0) for bound in bounds)
    return low > old_high or high < old_low

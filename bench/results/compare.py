"""Compare the times of two benchmark runs, and tell whether chance can explain what became slower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from edgevlm.bench.output import Line, beside
from edgevlm.bench.results.journal import Run, number
from edgevlm.errors import UserError

OURS = "edgevlm"
SAME = ("cpu", "cores", "threads", "memory_gb", "device", "gpu", "power_mode")
# strings that are results; all other strings and the numbers in SETTINGS identify a line's subject
RESULTS = ("policy_used", "stopped", "skipped", "left_out", "error")
SETTINGS = (
    "threads", "frames", "context", "chunk", "held", "tokens_per_frame", "layers", "kv_heads", "head_dim", "tokens", "budget",
    "batch", "seconds", "streams", "inline", "realtime",
)  # fmt: skip
TIMED = (
    "ms_per_token", "ms_per_frame", "ratio", "ttft_ms_p50", "tpot_ms_p50", "ms_p50", "ttft_ms", "ms", "frame_ms", "hold_ms",
    "write_ms", "joules_per_frame", "joules_per_token", "fps", "fps_ratio", "tokens_ratio",
)  # fmt: skip
MORE_IS_BETTER = ("fps", "fps_ratio", "tokens_ratio")
TWICE = 2.0  # chance alone rarely makes single measurements differ by this factor

Subject = tuple[tuple[str, Any], ...]


def difference(one: Line, other: Line) -> str:
    """Return the differences between two machines that affect speed, or ``""`` if there are none."""
    if not one or not other:
        return "a results file has no machine description"
    found = [name for name in SAME if one.get(name) != other.get(name)]
    return ", ".join(f"{name}: {one.get(name)} and {other.get(name)}" for name in found)


def compare(new: Run, old: Run, margin: float, *, force: bool = False) -> list[Line]:
    """Compare all timings that both runs have. Return a line for each timing, worst first.

    ``times_worse``: how many times worse the new median is. ``verdict``: whether chance can explain a median that is worse by
    more than ``margin``. Raises UserError for different machines, unless forced, and for runs that measured nothing in common.
    """
    if not force and (apart := difference(new.section("machine"), old.section("machine"))):
        raise UserError(f"{new.id} and {old.id} cannot be compared ({apart}); add --force to compare them anyway")
    ours, theirs = _placed(new.lines), _placed(old.lines)
    common = [subject for subject in ours if subject in theirs]
    if not common:
        raise UserError(f"{new.id} and {old.id} have no lines in common; run the same commands")
    changes = [change for subject in common for change in _changes(subject, ours[subject], theirs[subject], margin)]
    return sorted(changes, key=lambda change: -change["times_worse"])


def _placed(lines: Sequence[Line]) -> dict[Subject, Line]:
    """Return a run's lines, keyed by what each line measured and, if several measured the same thing, by their order."""
    seen, placed = Counter[Subject](), dict[Subject, Line]()
    for line in lines:
        if line.get("runtime", OURS) == OURS:
            about = [(key, value) for key, value in line.items() if isinstance(value, str) and key not in RESULTS]
            about += [(key, line[key]) for key in SETTINGS if isinstance(line.get(key), int | float)]
            subject = tuple(sorted(about))
            key = (*subject, ("nth", seen[subject]))
            placed[key] = line
            seen[subject] += 1
    return placed


def _changes(subject: Subject, new: Line, old: Line, margin: float) -> Iterator[Line]:
    for name in TIMED:
        one, other = number(new, name), number(old, name)
        if one is None or other is None or one <= 0 or other <= 0:
            continue
        now, before = ([number(line, end) for end in _ends(name, line)] for line in (new, old))
        worse = other / one if name in MORE_IS_BETTER else one / other
        yield {
            "bench": "change", "field": name, "new": one, "old": other, "times_worse": round(worse, 4),
            "verdict": "" if worse <= 1 + margin else _verdict(now, before, worse),
            "subject": " ".join(f"{key.replace('_', ' ')} {value}" for key, value in subject if key != "nth"),
        }  # fmt: skip


def _ends(name: str, line: Line) -> list[str]:
    return [name, name.replace("_p50", "_p95")] if name.endswith("_p50") else beside(name, line)


def _verdict(new: list[float | None], old: list[float | None], worse: float) -> str:
    """Return ``chance`` if the gap between the spreads is at most the sum of their widths, otherwise ``worse``."""
    if len(new) != 2 or len(old) != 2 or None in (*new, *old):
        return "worse" if worse >= TWICE else "no spread"
    (low, high), (old_low, old_high) = ([value or 0.0 for value in spread] for spread in (new, old))
    reach = (high - low) + (old_high - old_low)
    return "worse" if low - old_high > reach or old_low - high > reach else "chance"

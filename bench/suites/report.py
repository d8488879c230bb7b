"""What a run found: a table a suite as its paper has it, JSON lines, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgevlm.bench.suites import suite_of
from edgevlm.bench.suites.fields import shown
from edgevlm.bench.suites.run import SuiteResults
from edgevlm.bench.suites.scoring import Record, marks_of
from edgevlm.bench.suites.tally import Column, ScoredAnswer, Tally
from edgevlm.calib.accuracy.variants import Run

WIDE = 10  # characters of a head that still goes on top of a table
NAMED = 5  # of a list that is longer, on the report for people

Line = dict[str, Any]


def columns_of(outcome: SuiteResults, run: Run) -> list[Column]:
    """The suite's columns, from records that are scored again."""
    tally = Tally(_result(record) for record in outcome.records[run])
    return list(suite_of(outcome.job.suite).columns(tally))


def _result(record: Record) -> ScoredAnswer:
    return ScoredAnswer(record["video"], record["category"], record["subtask"], marks_of(record), record.get("rating"))


def lines(outcome: SuiteResults) -> Iterator[Line]:
    """JSON lines: a column of a policy at a budget each, what was skipped, and last what was counted."""
    head = {"bench": "accuracy", "suite": outcome.job.suite}
    for run in outcome.runs:
        most = max(record.get("bytes", 0) for record in outcome.records[run])
        for column in columns_of(outcome, run):
            of = column.estimate
            yield {
                **head, "policy": run.label, "budget": run.budget, "tokens": run.tokens or None, "column": column.head,
                "name": column.name, "rating" if column.rating else "accuracy": _rounded(column.value),
                "ci_low": _rounded(of.low if of else None), "ci_high": _rounded(of.high if of else None),
                "questions": of and of.count, "videos": of and of.clusters, "fps": outcome.job.fps, "bytes": most,
            }  # fmt: skip
    for skip in outcome.skipped:
        yield {**head, "policy": skip.label, "budget": skip.budget, "skipped": skip.reason}
    yield {**head, **counts(outcome)}


def counts(outcome: SuiteResults) -> Line:
    """What there was and what is not in the shares: each with the names of all."""
    first = outcome.records[outcome.runs[0]] if outcome.runs else []
    errors = [record for records in outcome.records.values() for record in records if record["error"]]
    return {
        "questions": len(outcome.questions),
        "asked": len(first),
        "videos": len({record["video"] for record in first}),
        "unscored": sum(marks_of(record) is None and not record["error"] for record in first),
        "malformed": [{"file": one.file, "record": one.place, "reason": one.reason} for one in outcome.data.findings],
        "missing_videos": list(outcome.data.missing),
        "beyond_end": [{"record": r["record"], "video": r["video"], "late_s": r["late_s"]} for r in first if r["late_s"]],
        "unanswered": [{name: r[name] for name in ("record", "policy", "budget", "video", "error")} for r in errors],
    }


def describe(outcome: SuiteResults) -> str:
    """The report for people: shares in percent, ratings from 0 to 5."""
    suite, count = suite_of(outcome.job.suite), counts(outcome)
    lines = [
        f"{suite.title}: {count['asked']} questions on {count['videos']} videos at {outcome.job.fps:g} frames a second; "
        "percent right, [95 %, by video]"
    ]
    if outcome.runs:
        lines += ["", *_table(outcome)]
    lines += [f"skipped: {skip.label} at {skip.budget}: {skip.reason}" for skip in outcome.skipped]
    return "\n".join([*lines, *_left_out(count)])


def _table(outcome: SuiteResults) -> Iterator[str]:
    """Policies down, columns across; columns with long names below, a line each."""
    rows = {run: columns_of(outcome, run) for run in outcome.runs}
    heads = list(dict.fromkeys(column.head for columns in rows.values() for column in columns))
    across, below = [h for h in heads if len(h) <= WIDE], [h for h in heads if len(h) > WIDE]
    names = {run: f"{run.label} {run.budget}" for run in outcome.runs}
    width = max(len("policy, budget"), *map(len, names.values())) + 2
    widths = {head: max(len(head), 5) + 2 for head in across}
    yield f"{'policy, budget':<{width}}{'tokens':>7}" + "".join(f"{shown(head):>{widths[head]}}" for head in across)
    for run, columns in rows.items():
        by_head = {column.head: column for column in columns}
        shown_cells = "".join(f"{_value(by_head.get(head)):>{widths[head]}}" for head in across)
        yield f"{names[run]:<{width}}{run.tokens or '-':>7}{shown_cells}{_interval(columns, across)}"
    if below:
        wide = max(map(len, names.values())) + 2
        longest = max(map(len, below))
        yield ""
        yield " " * longest + "".join(f"{name:>{wide}}" for name in names.values())
        for head in below:
            found = [next((column for column in columns if column.head == head), None) for columns in rows.values()]
            yield f"{shown(head):<{longest}}" + "".join(f"{_value(column):>{wide}}" for column in found)


def _interval(columns: list[Column], heads: list[str]) -> str:
    """Of the last column of the table, where it is a share and no mean."""
    of = next((column.estimate for column in columns if heads and column.head == heads[-1]), None)
    return f"  [{100 * of.low:.1f}, {100 * of.high:.1f}]" if of else ""


def _left_out(count: Line) -> Iterator[str]:
    if count["unscored"]:
        yield f"not scored: {count['unscored']} answers a policy, which nothing here says the truth of"
    if missing := count["missing_videos"]:
        yield f"missing: {len(missing)} videos: {_few([shown(video) for video in missing])}"
    if malformed := count["malformed"]:
        named = [f"{one['file']} record {one['record']}: {one['reason']}" for one in malformed]
        yield f"malformed: {len(malformed)} records left out: {_few(named)}"
    if late := count["beyond_end"]:
        named = [f"{one['record']} by {one['late_s']:g} s" for one in late]
        yield f"beyond the end: {len(late)} questions are timed after the end of their video, and saw all of it: {_few(named)}"
    if unanswered := count["unanswered"]:
        named = [f"{one['record']} ({one['policy']} {one['budget']}): {one['error']}" for one in unanswered]
        yield f"not answered: {len(unanswered)}: {_few(named)}"


def _few(names: list[str]) -> str:
    more = f"; {len(names) - NAMED} more, with --json" if len(names) > NAMED else ""
    return "; ".join(name if name.isprintable() else ascii(name) for name in names[:NAMED]) + more


def _value(column: Column | None) -> str:
    if column is None or column.value is None:
        return "-"
    return f"{column.value:.2f}" if column.rating else f"{100 * column.value:.1f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

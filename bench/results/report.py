"""``edgevlm bench report``: results as one HTML page that needs nothing else, with charts, tables and the JSON itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from edgevlm.bench.charts import Bar, bars, clean, lines
from edgevlm.bench.output import Line, beside, cell, head, plain
from edgevlm.bench.results.journal import Entry, Run, number
from edgevlm.errors import UserError
from edgevlm.runtime.kv import DTYPES

BEGIN, END = '<script type="application/json" id="results">', "</script>"
LONG = 24  # rows from which a table is folded
TOO_SMALL = 200e6  # bytes of a read that a processor's cache could hold part of
CACHED_MB = 64.0  # MB that one token reads and a processor's cache could hold: memory does not bound them
OVER_STREAM = (  # field, title, unit
    ("cache_mb", "keys and values held", "MB"),
    ("peak_rss_mb", "peak memory of the process", "MB"),
    ("ttft_ms_p50", "time to an answer's first token, median", "ms"),
    ("fps", "frames a second", "frames/s"),
    ("joules_per_frame", "energy a frame", "J"),
)

Chart = tuple[str, str]  # title, SVG


def write(path: Path, runs: Sequence[Run], changes: Sequence[Line] = ()) -> None:
    """Write the page of the runs, newest first. Raises UserError where ``path`` cannot be written."""
    try:
        path.write_text(page(runs, changes), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None


def page(runs: Sequence[Run], changes: Sequence[Line] = ()) -> str:
    """HTML of the runs, and of ``changes`` from a baseline."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"clean": clean, "plain": plain, "image": _image}
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    journal = json.dumps([line for run in runs for line in run.journal()]).replace("<", "\\u003c")
    return template.render(
        runs=list(reversed(runs)), charts=charts, tables=tables, changes=table_of(changes) if changes else None, long=LONG,
        data=f"{BEGIN}{journal}{END}",
    )  # fmt: skip


def extract(path: Path) -> list[Line]:
    """The lines of JSON that a page was made of. Raises UserError for a file without them."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text.partition(BEGIN)[2].partition(END)[0])
        if not isinstance(found, list):
            raise ValueError
    except OSError as error:
        raise UserError(f"--extract {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"--extract {path}: holds no results; give a page that edgevlm bench report wrote") from None
    return found


def tables(entry: Entry) -> list[dict[str, Any]]:
    """The lines of a command as tables: lines with the same fields share one."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in entry.lines:
        groups.setdefault(tuple(line), []).append(line)
    return [table_of(group) for group in groups.values()]


def table_of(group: Sequence[Line]) -> dict[str, Any]:
    """``heads`` and ``rows`` of text; ``fixed``: what is the same in all lines and stands above them."""
    first = group[0]
    names = [name for name in first if name != "bench"]
    taken = {part for name in names for part in beside(name, first)}
    names = [name for name in names if name not in taken]
    fixed = [name for name in names if len(group) > 1 and all(line[name] == first[name] for line in group)]
    shown = [name for name in names if name not in fixed] or names
    return {
        "heads": [head(name, first) for name in shown],
        "rows": [[cell(name, line) for name in shown] for line in group],
        "fixed": ", ".join(f"{head(name, first)} {cell(name, first)}" for name in fixed) if shown != names else "",
    }


def charts(entry: Entry, run: Run) -> list[Chart]:
    """The charts of a command's lines."""
    drawn: list[Chart] = []
    for bench, draw in DRAWN.items():
        if found := [line for line in entry.lines if line.get("bench") == bench]:
            drawn += [(title, svg) for title, svg in draw(found, run) if svg]
    return drawn


def bandwidth(run: Run) -> dict[int, float]:
    """GB/s of the fastest plain read in the run's ``bench compression``, by number of threads."""
    found: dict[int, float] = {}
    for line in run.lines:
        sizes = [number(line, name) for name in ("layers", "kv_heads", "head_dim", "tokens")]
        took, threads, dtype = number(line, "read_ms"), number(line, "threads"), DTYPES.get(str(line.get("dtype")))
        if line.get("bench") != "compression" or None in sizes or not took or threads is None or dtype is None:
            continue
        size = 2.0 * dtype.itemsize
        for each in sizes:
            size *= each or 0
        if size >= TOO_SMALL:
            found[int(threads)] = max(found.get(int(threads), 0.0), size / 1e6 / took)
    return found


def _image(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _stream(found: Sequence[Line], run: Run) -> Iterator[Chart]:
    for model, own in _grouped(found, lambda line: str(line.get("model"))).items():
        several = len({str(line.get("chunk")) for line in own}) > 1
        groups = _grouped(own, _policy_and_chunk if several else lambda line: str(line.get("policy")))
        for field, title, unit in OVER_STREAM:
            series = {name + _ending(group): _points(group, "frames", field) for name, group in groups.items()}
            shown = {name: points for name, points in series.items() if points}
            yield f"{model}: {title}", lines("frames of the stream", unit, shown)


def _policy_and_chunk(line: Line) -> str:
    return f"{line.get('policy')}, chunks of {line.get('chunk')}"


def _ending(group: Sequence[Line]) -> str:
    if not any("stopped" in line for line in group):
        return ""
    return ": OOM" if any(line.get("oom") is True for line in group) else ": stopped"


def _accuracy(found: Sequence[Line], run: Run) -> Iterator[Chart]:
    past = [line for line in found if line.get("kind") == "backward"]
    for suite, own in _grouped(past, lambda line: str(line.get("suite"))).items():
        groups = _grouped(own, lambda line: str(line.get("policy")))
        series = {name: points for name, group in groups.items() if (points := _points(group, "tokens", "accuracy"))}
        yield f"{suite}: questions about the past answered right", lines("tokens kept per layer", "fraction", series, top=1.0)


def _decode(found: Sequence[Line], run: Run) -> Iterator[Chart]:
    rates, rows = bandwidth(run), list[Bar]()
    for line in found:
        took, read = number(line, "ms_per_token"), number(line, "read_mb")
        if took is None:
            continue
        rate = rates.get(int(number(line, "threads") or 0))
        bound = read / rate if read is not None and rate is not None and read >= CACHED_MB else None
        label = "{}, {}, {} held, KV {}".format(*(line.get(name) for name in ("runtime", "precision", "context", "kv")))
        rows.append(Bar(label, took, number(line, "low"), number(line, "high"), bound))
    said = ", ".join(f"{rate:.1f} GB/s ({threads} threads)" for threads, rate in sorted(rates.items()))
    red = f"; red: bytes read over {said}" if any(row.mark for row in rows) else "; no bandwidth measured to compare with"
    yield "one token, beside the time its bytes take to read", bars(f"ms a token{red}", rows)


def _compression(found: Sequence[Line], run: Run) -> Iterator[Chart]:
    rows = [
        Bar(
            f"{line.get('policy')}, {line.get('dtype')}, {line.get('threads')} threads",
            reads,
            *_ends(line, "pass_low", "pass_high"),
            1.0,
        )
        for line in found
        if (reads := number(line, "pass_over_read")) is not None
    ]
    yield "a compression, in plain reads of all keys and values", bars("reads", rows)


def _against(found: Sequence[Line], run: Run) -> Iterator[Chart]:
    for unit, field, low, high in (("frame", "ms_per_frame", "low", "high"), ("token", "tpot_ms", "tpot_low", "tpot_high")):
        rows = [
            Bar(f"{line.get('runtime')}, {line.get('precision')}", took, *_ends(line, low, high))
            for line in found
            if (took := number(line, field)) is not None
        ]
        yield f"a {unit} of the same stream, in turn", bars(f"ms a {unit}", rows)


def _ends(line: Line, low: str, high: str) -> tuple[float | None, float | None]:
    return number(line, low), number(line, high)


def _grouped(found: Sequence[Line], name: Callable[[Line], str]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(name(line), []).append(line)
    return groups


def _points(found: Sequence[Line], x: str, y: str) -> list[tuple[float, float]]:
    """The points of the lines that have both numbers, none below 0, x rising."""
    pairs = [(number(line, x), number(line, y)) for line in found]
    return sorted((one, other) for one, other in pairs if one is not None and other is not None and min(one, other) >= 0)


DRAWN: dict[str, Callable[[Sequence[Line], Run], Iterator[Chart]]] = {
    "stream": _stream, "stream-against": _against, "accuracy": _accuracy, "decode": _decode, "compression": _compression,
}  # fmt: skip

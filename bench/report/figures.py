"""Which charts a run's lines make: a stream's memory, answers, speed and power; accuracy; the roofline; compressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from edgevlm.bench.report.chart import Bar, Series, bars, lines
from edgevlm.bench.results.journal import Entry, Line, Run, number
from edgevlm.runtime.kv import DTYPES

OVER_STREAM = (  # field, title, y axis
    ("cache_mb", "keys and values held", "MB"),
    ("peak_rss_mb", "peak memory of the process", "MB"),
    ("ttft_ms_p50", "time to an answer's first token, median", "ms"),
    ("fps", "frames a second", "frames/s"),
    ("joules_per_frame", "energy a frame", "J"),
)
TOO_SMALL = 200e6  # bytes of a read that a processor's cache could hold part of
CACHED_MB = 64.0  # of a token's reads, that a processor's cache could hold: memory does not bind them
ABOUT_BEFORE = "backward"  # the kind of all questions about what is no longer to be seen


def figures(entry: Entry, run: Run) -> Iterator[str]:
    """HTML of an entry's charts."""
    for bench, draw in DRAWN.items():
        found = [line for line in entry.lines if line.get("bench") == bench]
        if found:
            yield from filter(None, draw(found, run))


def bandwidth(run: Run) -> dict[int, float]:
    """By threads: MB a millisecond (GB/s) of the fastest plain read that ``bench compression`` of the run measured."""
    found: dict[int, float] = {}
    for line in run.lines:
        sizes = [number(line, name) for name in ("layers", "kv_heads", "head_dim", "tokens")]
        took, threads = number(line, "read_ms"), number(line, "threads")
        if line.get("bench") != "compression" or None in sizes or not took or threads is None:
            continue
        dtype = DTYPES.get(str(line.get("dtype")))
        size = 2.0 * (0 if dtype is None else dtype.itemsize)
        for each in sizes:
            size *= each or 0
        if size >= TOO_SMALL:
            found[int(threads)] = max(found.get(int(threads), 0.0), size / 1e6 / took)
    return found


def _stream(found: Sequence[Line], run: Run) -> Iterator[str]:
    for model in _values(found, "model"):
        own = [line for line in found if line.get("model") == model]
        several = len(_values(own, "chunk")) > 1
        for field, title, unit in OVER_STREAM:
            groups = _grouped(own, partial(_stream_name, several=several))
            series = [Series(name + _ending(group), _points(group, "frames", field)) for name, group in groups.items()]
            drawn = lines(f"{model}: {title}", "frames of the stream", unit, [one for one in series if one.points])
            if not drawn and field == "joules_per_frame":
                drawn = "<p>Energy: not measured. No meter of this machine could be read.</p>"
            yield drawn


def _stream_name(line: Line, several: bool) -> str:
    return f"{line.get('policy')}, chunks of {line.get('chunk')}" if several else str(line.get("policy"))


def _ending(group: Sequence[Line]) -> str:
    """How a stream that was not watched to its end ended."""
    if not any("stopped" in line for line in group):
        return ""
    return ": OOM" if any(line.get("oom") is True for line in group) else ": stopped"


def _accuracy(found: Sequence[Line], run: Run) -> Iterator[str]:
    about = [line for line in found if line.get("kind") == ABOUT_BEFORE]
    for suite in _values(about, "suite"):
        own = [line for line in about if line.get("suite") == suite]
        groups = _grouped(own, lambda line: str(line.get("policy")))
        series = [Series(name, _points(group, "tokens", "accuracy")) for name, group in groups.items()]
        yield lines(f"{suite}: questions about before, share right", "tokens kept a layer", "share", series, top=1.0)


def _decode(found: Sequence[Line], run: Run) -> Iterator[str]:
    timed = [line for line in found if number(line, "ms_per_token") is not None]
    rates, missing = bandwidth(run), False
    rows = list[Bar]()
    for line in timed:
        read, rate = number(line, "read_mb"), rates.get(int(number(line, "threads") or 0))
        bound = read is not None and rate is not None and read >= CACHED_MB
        missing = missing or not bound
        places = [line.get(name) for name in ("runtime", "precision", "context", "kv")]
        label = "{}, {}, {} held, KV {}".format(*places)
        mark = (read or 0) / (rate or 1) if bound else None
        rows.append(Bar(label, number(line, "ms_per_token") or 0, number(line, "low"), number(line, "high"), mark))
    said = ", ".join(f"{rate:.1f} GB/s (threads: {threads})" for threads, rate in sorted(rates.items()))
    yield bars(
        "roofline: a token, and its bytes over the bandwidth of a plain read",
        "ms a token",
        rows,
        f"red: bytes over {said}" if any(row.mark for row in rows) else "",
    )
    if missing:
        yield "<p>No bound: no <code>bench compression</code> on as many threads in this run, or a cache may hold it.</p>"


def _compression(found: Sequence[Line], run: Run) -> Iterator[str]:
    rows = [
        Bar(
            f"{line.get('policy')}, {line.get('dtype')}, threads: {line.get('threads')}", number(line, "pass_over_read") or 0,
            number(line, "pass_low"), number(line, "pass_high"), 1.0,
        )
        for line in found
        if number(line, "pass_over_read") is not None
    ]  # fmt: skip
    yield bars("a compression over one plain read of all keys and values", "reads", rows, "red: one read")


def _against(found: Sequence[Line], run: Run) -> Iterator[str]:
    """A frame and a token of a stream, ours and another's that took turns."""
    timed = [line for line in found if number(line, "ms_per_frame") is not None]
    names = [f"{line.get('runtime')}, {line.get('precision')}" for line in timed]
    for what, field, ends in (("frame", "ms_per_frame", ("low", "high")), ("token", "tpot_ms", ("tpot_low", "tpot_high"))):
        rows = [
            Bar(name, number(line, field) or 0, *(number(line, end) for end in ends))
            for name, line in zip(names, timed, strict=True)
        ]
        yield bars(f"a {what} of the same stream, in turn", f"ms a {what}", rows)


def _values(found: Sequence[Line], key: str) -> list[Any]:
    return list(dict.fromkeys(str(line.get(key)) for line in found))


def _grouped(found: Sequence[Line], name: Callable[[Line], str]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(name(line), []).append(line)
    return groups


def _points(found: Sequence[Line], x: str, y: str) -> list[tuple[float, float]]:
    """Places of the lines that have both numbers, none below 0, x rising."""
    pairs = [(number(line, x), number(line, y)) for line in found]
    return sorted((one, other) for one, other in pairs if one is not None and other is not None and min(one, other) >= 0)


DRAWN: dict[str, Callable[[Sequence[Line], Run], Iterator[str]]] = {
    "stream": _stream, "stream-against": _against, "accuracy": _accuracy, "decode": _decode, "compression": _compression,
}  # fmt: skip

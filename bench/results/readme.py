"""Tables of README made from results: what stands between ``<!-- bench: NAME -->`` and ``<!-- /bench -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from edgevlm.bench.results.journal import Line, Run, number
from edgevlm.errors import UserError

MARKED = re.compile(r"(<!-- bench: ([\w-]+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)
OURS, OTHER = "edgevlm", "llama.cpp"
SHAPE = "seeded-135m"


def rewrite(path: Path, runs: Sequence[Run]) -> list[str]:
    """Make the marked tables of the file anew; returns their names. Raises UserError for a name or lines that are not there."""
    try:
        text = path.read_text(encoding="utf-8")
        made = filled(text, runs)
        if made != text:
            path.write_text(made, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--readme {path}: cannot be read or written ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--readme {path}: is not UTF-8") from None
    return [found[1] for found in MARKED.findall(text)]


def filled(text: str, runs: Sequence[Run]) -> str:
    """The text with each marked table made from the lines of the last run that has some for it."""

    def table(found: re.Match[str]) -> str:
        name = found[2]
        if name not in TABLES:
            raise UserError(f"<!-- bench: {name} -->: there is no such table; there is {', '.join(TABLES)}")
        rows = next((rows for run in reversed(runs) if len(rows := TABLES[name](run.lines)) > 2), None)
        if rows is None:
            raise UserError(f"<!-- bench: {name} -->: the results have no lines for this table")
        return found[1] + "\n".join(rows) + "\n" + found[4]

    return MARKED.sub(table, text)


def decode_table(lines: Sequence[Line]) -> list[str]:
    """A token beside llama.cpp's, each with the keys and values that it is faster with: milliseconds and the ratio in pairs."""
    own = [line for line in lines if line.get("bench") == "decode" and line.get("model") == SHAPE]
    precisions = list(dict.fromkeys(str(line["precision"]) for line in own))
    rows = ["| tokens held | threads | " + " | ".join(precisions) + " |", "|---" * (2 + len(precisions)) + "|"]
    for threads in sorted({line["threads"] for line in own}):
        for context in sorted({line["context"] for line in own}):
            cells = [_beside(own, {"threads": threads, "context": context, "precision": name}) for name in precisions]
            rows.append(f"| {context:,} | {threads} | " + " | ".join(cells) + " |")
    return rows


def _beside(own: Sequence[Line], place: Line) -> str:
    here = [line for line in own if place.items() <= line.items()]
    fastest = {
        name: min((line for line in here if line["runtime"] == name and "ms_per_token" in line), key=_ms, default=None)
        for name in (OURS, OTHER)
    }
    ours, theirs = fastest[OURS], fastest[OTHER]
    if ours is None:
        return "-"
    if theirs is None:
        return rounded(_ms(ours))
    pair = {"runtime": OURS, "against": OTHER, "kv": ours["kv"], "against_kv": theirs["kv"]}
    ratio = next((line["ratio"] for line in here if pair.items() <= line.items()), None)
    both = f"{rounded(_ms(ours))} / {rounded(_ms(theirs))}"
    return both if ratio is None else f"{both} = {ratio:.2f}".replace("= 0.", "= .")


def rounded(value: float) -> str:
    """One decimal of the number as it was printed, halves up: 7.05 is 7.1, whatever its nearest binary number is."""
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _ms(line: Line) -> float:
    return float(line["ms_per_token"])


def stream_table(lines: Sequence[Line]) -> list[str]:
    """The demo's stream under each policy, chunks of 8: MB of keys and values as it grows, and compression's share of time."""
    own = [line for line in lines if (line.get("bench"), line.get("model"), line.get("chunk")) == ("stream", "demo", 8)]
    marks = sorted({line["frames"] for line in own})
    heads = ["policy", *(f"{mark:,} frames, MB" for mark in marks), "compression, %"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for policy in dict.fromkeys(line["policy"] for line in own):
        there = {line["frames"]: line for line in own if line["policy"] == policy}
        shares = [share for line in there.values() if (share := number(line, "compress_share")) is not None]
        cells = [f"`{policy}`", *(_held(there.get(mark, {})) for mark in marks), f"{100 * shares[-1]:.1f}" if shares else "-"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _held(line: Line) -> str:
    if "stopped" in line:
        return "OOM" if line.get("oom") else "stopped"
    return f"{line['cache_mb']:.2f}" if "cache_mb" in line else "-"


TABLES: dict[str, Callable[[Sequence[Line]], list[str]]] = {"decode": decode_table, "stream": stream_table}

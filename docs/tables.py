"""Make the documents' tables from results: ``python docs/tables.py docs/results.jsonl README.md`` rewrites them.

Each stands between ``<!-- bench: NAME -->`` and ``<!-- /bench -->``.
A table is a function from the lines of a run to its head and rows; a run without lines for it gives no rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from pathlib import Path

from edgevlm.bench.output import Line
from edgevlm.bench.results.journal import Run, number, read_runs
from edgevlm.errors import UserError
from edgevlm.runtime.settings import ALL

OURS, LLAMA, TRANSFORMERS = "edgevlm", "llama.cpp", "transformers"
POLICIES = ("infinipot-v", "hermes", "hermes:guidance_rows=2", "purekv", "last-seen")
SHORT = ("full KV", "last-seen", "h2o", "purekv", "infinipot-v", "sliding-window")
SEEDED = "seeded-0.5b"
STREAM_MARKS = (16, 64, 256, 1200)  # frames
CLIPS = {"vtest.avi": "street (`vtest.avi`)", "room": "still room, drawn", "moving": "moving camera, drawn"}
ACROSS = ("longrun", "longstream")  # tables whose rows come from all runs
MARKED = re.compile(r"(<!-- bench: ([\w-]+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)

Text = Callable[[Line], str]
Table = tuple[list[str], list[list[str]]]  # head and rows


def rewrite(path: Path, runs: Sequence[Run]) -> list[str]:
    """Rewrite the marked tables of a file; returns their names. Raises UserError for an unknown name or missing results."""
    try:
        text = path.read_text(encoding="utf-8")
        made = filled(text, runs)
        if made != text:
            path.write_text(made, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read or written ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8") from None
    return [found[1] for found in MARKED.findall(text)]


def filled(text: str, runs: Sequence[Run]) -> str:
    """The text with each marked table made from the last run in the file that has lines for it.

    Tables in ACROSS are made from all runs; the last of several lines for the same policy, frames, budget and kind counts.
    """
    keys = ("bench", "suite", "seed", "policy", "frames", "budget", "kind")
    newest = {tuple(line.get(key) for key in keys): line for run in runs for line in run.lines}

    def table(found: re.Match[str]) -> str:
        name = found[2]
        if name not in TABLES:
            raise UserError(f"<!-- bench: {name} -->: there is no such table; there is {', '.join(TABLES)}")
        sources = [[*newest.values()]] if name in ACROSS else [run.lines for run in reversed(runs)]
        made = next((made for lines in sources if (made := TABLES[name](lines))[1]), None)
        if made is None:
            raise UserError(f"<!-- bench: {name} -->: the results have no lines for this table")
        return found[1] + markdown(made) + found[4]

    return MARKED.sub(table, text)


def markdown(table: Table) -> str:
    heads, rows = table
    return (
        "".join(f"| {' | '.join(row)} |\n" for row in [heads])
        + "|---" * len(heads)
        + "|\n"
        + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    )


def decimals(value: float, digits: int = 2) -> str:
    """The number as printed, rounded half up, without a leading 0: ``.35``."""
    found = str(Decimal(str(value)).quantize(Decimal(10) ** -digits, ROUND_HALF_UP))
    return found[1:] if found.startswith("0.") else found


def two_digits(value: float) -> str:
    """Two significant digits."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def interval(line: Line, name: str, low: str, high: str, text: Callable[[float], str] = decimals) -> str:
    """``.80 [.70, .90]``; ``-`` without a value."""
    return "-" if line.get(name) is None else f"{text(line[name])} [{text(line[low])}, {text(line[high])}]"


def listing(where: Line, columns: dict[str, Text], also: Callable[[Line], bool] = lambda line: True) -> Callable[..., Table]:
    """A table with a row for each line that has the values of ``where``."""

    def table(lines: Sequence[Line]) -> Table:
        own = [line for line in lines if where.items() <= line.items() and also(line)]
        return [*columns], [[text(line) for text in columns.values()] for line in own]

    return table


def by_policy(rows: Sequence[tuple[str, Line, Callable[[Line], float]]]) -> Callable[..., Table]:
    """A table with a column for each of POLICIES; each row has a title, the values of its lines, and a number of each.

    Of several lines of a policy the last counts.
    """

    def table(lines: Sequence[Line]) -> Table:
        found = {
            title: {line.get("policy"): line for line in lines if where.items() <= line.items()} for title, where, _ in rows
        }
        known = [name for name in POLICIES if any(name in there for there in found.values())]
        made = [
            [title, *(two_digits(value(found[title][name])) if name in found[title] else "-" for name in known)]
            for title, _, value in rows
            if found[title]
        ]
        return ["", *known], made

    return table


def decode(lines: Sequence[Line]) -> Table:
    """A token's milliseconds beside llama.cpp's, each with its faster KV precision, and the ratio of pairs."""
    own = [line for line in lines if line.get("bench") == "decode" and line.get("model") == "seeded-135m"]
    precisions = list(dict.fromkeys(str(line["precision"]) for line in own))
    places = sorted({(line["threads"], line["context"]) for line in own})
    rows = [
        [
            f"{context:,}",
            str(threads),
            *(_beside(own, {"threads": threads, "context": context, "precision": name}) for name in precisions),
        ]
        for threads, context in places
    ]
    return ["tokens held", "threads", *precisions], rows


def _beside(own: Sequence[Line], place: Line) -> str:
    here = [line for line in own if place.items() <= line.items()]
    fastest: dict[str, Line] = {}
    for line in here:
        name = line["runtime"]
        if "ms_per_token" in line and (name not in fastest or line["ms_per_token"] < fastest[name]["ms_per_token"]):
            fastest[name] = line
    if OURS not in fastest:
        return "-"
    ours = fastest[OURS]
    if LLAMA not in fastest:
        return decimals(ours["ms_per_token"], 1)
    theirs = fastest[LLAMA]
    both = f"{decimals(ours['ms_per_token'], 1)} / {decimals(theirs['ms_per_token'], 1)}"
    pair = {"runtime": OURS, "against": LLAMA, "kv": ours["kv"], "against_kv": theirs["kv"]}
    ratio = next((line["ratio"] for line in here if pair.items() <= line.items()), None)
    return both if ratio is None else f"{both} = {decimals(ratio)}"


def stream(lines: Sequence[Line]) -> Table:
    """The demo's stream by policy, chunks of 8: MB of keys and values as it grows, and compression's part of the time."""
    own = [line for line in lines if (line.get("bench"), line.get("model"), line.get("chunk")) == ("stream", "demo", 8)]
    marks, rows = [mark for mark in STREAM_MARKS if mark in {line["frames"] for line in own}], []
    for policy in dict.fromkeys(line["policy"] for line in own):
        there = {line["frames"]: line for line in own if line["policy"] == policy}
        shares = [part for line in there.values() if (part := number(line, "compress_fraction")) is not None]
        held = [_held(there.get(mark, {})) for mark in marks]
        rows.append([f"`{policy}`", *held, f"{100 * shares[-1]:.1f}" if shares else "-"])
    return ["policy", *(f"{mark:,} frames, MB" for mark in marks), "compression, %"], rows


def _held(line: Line) -> str:
    if "stopped" in line:
        return "OOM" if line.get("oom") else "stopped"
    return f"{line['cache_mb']:.2f}" if "cache_mb" in line else "-"


def against(lines: Sequence[Line]) -> Table:
    """A stream beside transformers in float32; the last line of each runtime and precision counts."""
    own = [line for line in lines if line.get("bench") == "stream-against"]
    timed = {(line["runtime"], line["precision"]): line for line in own if "fps_ratio" not in line}
    ratios = {(line["runtime"], line["precision"]): line for line in own if "fps_ratio" in line}
    rows, known = [], timed if (TRANSFORMERS, "fp32") in timed else {}
    for place, line in sorted(known.items(), key=lambda pair: pair[0][0] != OURS):
        pair = ratios.get(place, {"fps_ratio": 1, "cpu_ratio": 1, "tokens_ratio": 1})
        frames, cpu, tokens = (
            _rate(pair[key], 2 if place in ratios else 0) for key in ("fps_ratio", "cpu_ratio", "tokens_ratio")
        )
        rows.append([
            f"{line['runtime']}, {line['precision']}, {line['vision_precision']} tower", f"{line['fps']:.3f}", frames, cpu,
            _rate(line["tokens_per_s"], 1), tokens,
            *(f"{line[key]:,.0f}" for key in ("vision_ms", "prefill_ms", "compress_ms")),
        ])  # fmt: skip
    heads = ["", "frames/s", "times theirs", "by processor time", "tokens/s", "times theirs"]
    return [*heads, "vision, ms", "prefill, ms", "compression, ms"], rows


def _times(ratio: float) -> str:
    return f"{ratio:.{1 if ratio >= 2 else 2}f}"


def _rate(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def stream_changed(lines: Sequence[Line], way: str) -> Table:
    """What is appended and encoded of a clip, and the frames a second over those of whole frames; a clip's last run counts.

    way: ``changed`` or ``auto``, of lines that do not append and encode all.
    """
    own = {
        (line["clip"], line["append"] == ALL, line["encode"] == ALL): line
        for line in lines
        if line.get("bench") == "stream-changed"
        and str(line["model"]).endswith(SEEDED)
        and all(line[each].startswith((ALL, way)) for each in ("append", "encode"))
    }
    rows = []
    for (clip, appends_all, encodes_all), line in own.items():
        if appends_all and encodes_all:
            continue
        whole = own[clip, True, True]
        rows.append([
            CLIPS.get(clip, clip), *("all" if is_all else way for is_all in (appends_all, encodes_all)),
            decimals(line["appended"]), decimals(line["encoded"]), f"{whole['fps']:.2f}", f"{line['fps']:.2f}",
            interval(line, "fps_ratio", "low", "high", _times), _times(line["cpu_ratio"]), _times(line["ceiling"]),
        ])  # fmt: skip
    heads = ["clip", "append", "encode", "tokens appended", "patches encoded", "frames/s, whole", "frames/s, changed"]
    return [*heads, "times", "by processor time", "ceiling"], rows


def accuracy(lines: Sequence[Line]) -> Table:
    """Questions about the past answered right, test seeds, by frames and budget."""
    place = {"bench": "accuracy", "suite": "streamqa", "kind": "backward", "seed": "test"}
    own = [line for line in lines if place.items() <= line.items() and number(line, "accuracy") is not None]
    if any(line.get("append", ALL) != ALL for line in own):
        own = []  # that run has a table of its own
    columns = {(line["frames"], line["budget"]) for line in own if line["policy"] != "full"}
    ordered = sorted(columns, key=lambda column: (column[0], -float(column[1].rstrip("%"))))
    rows = []
    for policy in dict.fromkeys(line["policy"] for line in own):
        # full KV has no budget: its share stands in each column of its frames
        there = {(line["frames"], line["budget"]): line["accuracy"] for line in own if line["policy"] == policy}
        found = [there.get(column, there.get((column[0], "100%"))) for column in ordered]
        name = {"full": "full KV", "oracle": "oracle", "last-seen": "**`last-seen`**"}.get(policy, f"`{policy}`")
        rows.append([name, *("-" if value is None else decimals(value) for value in found)])
    return ["policy", *(f"{frames}: {budget.replace('%', ' %')}" for frames, budget in ordered)], rows


def accuracy_short(lines: Sequence[Line]) -> Table:
    """:func:`accuracy` of some policies on 128 frames at small budgets."""
    small = ("100%", "12.5%", "6.25%", "3%")
    heads, rows = accuracy([line for line in lines if line.get("frames") == 128 and line.get("budget") in small])
    return [head.removeprefix("128: ") for head in heads], [row for row in rows if row[0].strip("*`") in SHORT]


def accuracy_append(suite: str, budget: str = "12.5%") -> Callable[..., Table]:
    """Each policy on whole frames and where only what changed is appended, test seeds: before, paired, and now, by frames."""

    def table(lines: Sequence[Line]) -> Table:
        own = [line for line in lines if (line.get("suite"), line.get("seed")) == (suite, "test") and "append" in line]
        own = [line for line in own if line["budget"] in ("100%", budget)]
        if not any(line["budget"] == budget for line in own):
            return [], []
        at = {(line["policy"].partition("@")[0], line["frames"], line["append"] == ALL, line["kind"]): line for line in own}
        if not any(line["append"] != ALL for line in own):
            return [], []
        frames = sorted({line["frames"] for line in own if line["budget"] == budget})
        policies = list(dict.fromkeys(policy for policy, *_ in at))
        rows = []
        for policy in sorted(policies, key=lambda name: (name != "full", -at[name, frames[-1], True, "backward"]["accuracy"])):
            cells = []
            for count in frames:
                (whole, then), (whole_now, now) = (
                    [at.get((policy, count, is_whole, kind), {}) for is_whole in (True, False)] for kind in ("backward", "now")
                )
                cells += [decimals(line["accuracy"]) if line else "-" for line in (whole, then)]
                cells.append(interval(then, "difference", "difference_low", "difference_high", partial(_signed, digits=3)))
                cells.append(", ".join(decimals(line["accuracy"]) if line else "-" for line in (whole_now, now)))
            rows.append([{"full": "full KV", "oracle": "oracle"}.get(policy, f"`{policy}`"), *cells])
        heads = ("all, before", "changed", "difference, paired", "now: all, changed")
        return ["policy", *(f"{count}: {head}" for count in frames for head in heads)], rows

    return table


def against_short(lines: Sequence[Line]) -> Table:
    """:func:`against` without what the stages take."""
    heads, rows = against(lines)
    return [heads[column] for column in (0, 1, 2, 4, 5)], [[row[column] for column in (0, 1, 2, 4, 5)] for row in rows]


def longstream(lines: Sequence[Line]) -> Table:
    """The longest streams: share right by budget; at the largest budget also by how long ago, and what it costs."""
    own = [
        line for line in lines if line.get("suite") == "longstream" and line.get("seed") == "test" and line["budget"].isdigit()
    ]
    own = [line for line in own if line["frames"] == max(line["frames"] for line in own)]
    budgets = sorted({line["budget"] for line in own}, key=int)
    at = {(line["policy"], line["budget"], line["kind"]): line for line in own}
    ago = [kind for kind in dict.fromkeys(line["kind"] for line in own) if kind.startswith("backward/")]
    there = {policy: line for (policy, budget, kind), line in at.items() if (budget, kind) == (budgets[-1], "backward")}
    rows = []
    for policy, line in sorted(there.items(), key=lambda pair: -pair[1]["accuracy"]):
        cells = [interval(at.get((policy, budget, "backward"), {}), "accuracy", "ci_low", "ci_high") for budget in budgets]
        is_reference, is_oracle = policy == line["against"], policy == "oracle"
        cells.append("" if is_reference else interval(line, "difference", "difference_low", "difference_high", _signed))
        cells += [decimals(at[policy, budgets[-1], kind]["accuracy"]) for kind in ago]
        cells += ["", ""] if is_oracle else [_column("ttft_ms", digits=1)(line), f"{line['moved'] / 1e3:.0f}"]
        rows.append([policy if is_oracle else f"`{policy}`", *cells])
    reference = "".join(f"- `{line['against']}`, paired" for line in own[:1])
    heads = [*(f"{budget} tokens" for budget in budgets), reference, *(kind.partition("/")[2] for kind in ago)]
    return ["policy", *heads, "first token, ms", "KB moved"], rows


def _signed(value: float, digits: int = 2) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{decimals(abs(value), digits)}"


def _compression(title: str, dtype: str, value: Callable[[Line], float]) -> tuple[str, Line, Callable[[Line], float]]:
    return title, {"bench": "compression", "dtype": dtype, "threads": 1, "layers": 36}, value


def _column(key: str, scale: float = 1.0, digits: int = 0) -> Text:
    return lambda line: f"{line[key] / scale:,.{digits}f}" if key in line else "-"


def _right(line: Line) -> str:
    return ", ".join(f"{name} {of}" for name, of in line["right"].items() if name not in ("now", "never"))


TABLES: dict[str, Callable[[Sequence[Line]], Table]] = {
    "accuracy": accuracy,
    "accuracy-append": accuracy_append("streamqa"),
    "accuracy-append-hard": accuracy_append("streamqa-hard"),
    "accuracy-append-small": accuracy_append("streamqa", "6.25%"),
    "accuracy-short": accuracy_short,
    "compression": by_policy([
        _compression("over one plain read of the same keys and values, fp32", "fp32", lambda line: line["pass_over_read"]),
        _compression("the same in fp16, which has half the bytes to read", "fp16", lambda line: line["pass_over_read"]),
        _compression("in int8, a quarter", "int8", lambda line: line["pass_over_read"]),
    ]),
    "decode": decode,
    "longrun": listing({"bench": "longrun"}, {
        "policy": lambda line: f"`{line['policy']}`", "frames": _column("frames"), "device KB": _column("device_bytes", 1e3),
        "host MB": _column("host_bytes", 1e6), "file MB": _column("file_bytes", 1e6),
        "first token, ms": _column("ttft_ms_p50", digits=1), "over the first": _column("ttft_ratio", digits=2),
        "KB moved": _column("moved_bytes_per_question", 1e3), "right after": _right,
    }),
    "longstream": longstream,
    "stream": stream,
    "stream-against": against,
    "stream-against-short": against_short,
    "stream-changed": partial(stream_changed, way="changed"),
    "stream-changed-auto": partial(stream_changed, way="auto"),
    "vision": listing(
        {"bench": "vision", "tower": "siglip-so400m-384", "batch": 1, "against": TRANSFORMERS},
        {
            "tower": lambda line: line["tower"], "threads": _column("threads"), "precision": lambda line: line["precision"],
            "time over transformers'": lambda line: interval(line, "ratio", "low", "high"),
            "processor time over theirs": lambda line: decimals(line["cpu_ratio"]),
        },
        lambda line: line["layers"] > 20,
    ),
}  # fmt: skip

if __name__ == "__main__":
    results, *documents = sys.argv[1:]
    for document in documents:
        print(document, *rewrite(Path(document), read_runs([results])))

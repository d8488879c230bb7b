"""README's tables, one function each: lines of a run to lines of Markdown, two heads and the rows.

A table that a run has no lines for has no rows. Which lines it takes, each function says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal

from edgevlm.bench.results.journal import Line, number

OURS, LLAMA, TRANSFORMERS = "edgevlm", "llama.cpp", "transformers"
SHAPE, TOWER, SEEDED = "seeded-135m", "siglip-so400m-384", "seeded-0.5b"
Row = tuple[str, Line, Callable[[Line], float]]  # its name, which lines it is of, and the number
POLICIES = ("infinipot-v", "hermes", "purekv", "last-seen")


def decode(lines: Sequence[Line]) -> list[str]:
    """A token beside llama.cpp's, each with the keys and values that it is faster with: milliseconds and the ratio in pairs."""
    own = [line for line in lines if line.get("bench") == "decode" and line.get("model") == SHAPE]
    precisions = list(dict.fromkeys(str(line["precision"]) for line in own))
    rows = _heads("tokens held", "threads", *precisions)
    for threads in sorted({line["threads"] for line in own}):
        for context in sorted({line["context"] for line in own}):
            cells = [_beside(own, {"threads": threads, "context": context, "precision": name}) for name in precisions]
            rows.append(_row(f"{context:,}", str(threads), *cells))
    return rows


def _beside(own: Sequence[Line], place: Line) -> str:
    here = [line for line in own if place.items() <= line.items()]
    fastest = {
        name: min((line for line in here if line["runtime"] == name and "ms_per_token" in line), key=_ms, default=None)
        for name in (OURS, LLAMA)
    }
    ours, theirs = fastest[OURS], fastest[LLAMA]
    if ours is None:
        return "-"
    if theirs is None:
        return rounded(_ms(ours))
    pair = {"runtime": OURS, "against": LLAMA, "kv": ours["kv"], "against_kv": theirs["kv"]}
    ratio = next((line["ratio"] for line in here if pair.items() <= line.items()), None)
    both = f"{rounded(_ms(ours))} / {rounded(_ms(theirs))}"
    return both if ratio is None else f"{both} = {share(ratio)}"


def _ms(line: Line) -> float:
    return float(line["ms_per_token"])


def stream(lines: Sequence[Line]) -> list[str]:
    """The demo's stream under each policy, chunks of 8: MB of keys and values as it grows, and compression's share of time."""
    own = [line for line in lines if (line.get("bench"), line.get("model"), line.get("chunk")) == ("stream", "demo", 8)]
    marks = sorted({line["frames"] for line in own})
    rows = _heads("policy", *(f"{mark:,} frames, MB" for mark in marks), "compression, %")
    for policy in dict.fromkeys(line["policy"] for line in own):
        there = {line["frames"]: line for line in own if line["policy"] == policy}
        shares = [part for line in there.values() if (part := number(line, "compress_share")) is not None]
        cells = [*(_held(there.get(mark, {})) for mark in marks), f"{100 * shares[-1]:.1f}" if shares else "-"]
        rows.append(_row(f"`{policy}`", *cells))
    return rows


def _held(line: Line) -> str:
    if "stopped" in line:
        return "OOM" if line.get("oom") else "stopped"
    return f"{line['cache_mb']:.2f}" if "cache_mb" in line else "-"


def against(lines: Sequence[Line]) -> list[str]:
    """A stream beside transformers: frames and tokens a second, and how many times theirs ours are, in pairs.

    Of several commands the last line of each runtime and precision.
    """
    own = [line for line in lines if line.get("bench") == "stream-against"]
    rows = _heads(
        "",
        "frames/s",
        "times theirs",
        "by processor time",
        "tokens/s",
        "times theirs",
        "vision, ms",
        "prefill, ms",
        "compression, ms",
    )
    timed = {(line["runtime"], line["precision"]): line for line in own if "fps_ratio" not in line}
    for line in sorted(timed.values(), key=lambda line: line["runtime"] != OURS):
        pair = {"runtime": line["runtime"], "precision": line["precision"]}
        beside = next((one for one in reversed(own) if "fps_ratio" in one and pair.items() <= one.items()), None)
        name = f"{line['runtime']}, {line['precision']}, {line['vision_precision']} tower"
        keys = ("fps_ratio", "cpu_ratio", "tokens_ratio")
        frames, cpu, tokens = ("1" if beside is None else _times(beside[key]) for key in keys)
        parts = [f"{line[key]:,.0f}" for key in ("vision_ms", "prefill_ms", "compress_ms")]
        rows.append(_row(name, f"{line['fps']:.3f}", frames, cpu, _rate(line["tokens_per_s"]), tokens, *parts))
    return rows


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def accuracy(lines: Sequence[Line]) -> list[str]:
    """Share of questions about before answered right, of test seeds, by frames and budget; policies as they come."""
    place = {"bench": "accuracy", "suite": "streamqa", "kind": "backward", "seed": "test"}
    own = [line for line in lines if place.items() <= line.items() and number(line, "accuracy") is not None]
    columns = sorted({(line["frames"], line["budget"]) for line in own if line["policy"] != "full"}, key=_column)
    rows = _heads("policy", *(f"{frames}: {budget.replace('%', ' %')}" for frames, budget in columns))
    for policy in dict.fromkeys(line["policy"] for line in own):
        # full KV has no budget: its share stands in each column of its frames
        there = {(line["frames"], line["budget"]): line["accuracy"] for line in own if line["policy"] == policy}
        found = [there.get(place, there.get((place[0], "100%"))) for place in columns]
        name = {"full": "full KV", "oracle": "oracle", "last-seen": "**`last-seen`**"}.get(policy, f"`{policy}`")
        rows.append(_row(name, *("-" if value is None else share(value) for value in found)))
    return rows


def _column(place: tuple[int, str]) -> tuple[int, float]:
    return place[0], -float(place[1].rstrip("%"))


def longstream(lines: Sequence[Line]) -> list[str]:
    """Streams of thousands of frames, the longest: share right by budget, and at the largest by how long ago, and the price."""
    place = {"suite": "longstream", "seed": "test"}
    own = [line for line in lines if place.items() <= line.items() and line["budget"].isdigit()]
    own = [line for line in own if line["frames"] == max(line["frames"] for line in own)]
    budgets = sorted({line["budget"] for line in own}, key=int)
    at = {(line["policy"], line["budget"], line["kind"]): line for line in own}
    ago = [kind for kind in dict.fromkeys(line["kind"] for line in own) if kind.startswith("backward/")]
    there = {policy: line for (policy, budget, kind), line in at.items() if (budget, kind) == (budgets[-1], "backward")}
    against = "".join(f"- `{line['against']}`, paired" for line in own[:1])
    columns = [*(f"{budget} tokens" for budget in budgets), against, *(kind.partition("/")[2] for kind in ago)]
    rows = _heads("policy", *columns, "first token, ms", "KB moved")
    for policy, line in sorted(there.items(), key=lambda pair: -pair[1]["accuracy"]):
        cells = [_interval(at.get((policy, budget, "backward"))) for budget in budgets]
        cells.append("" if policy == line["against"] else _paired(line))
        cells += [share(at[policy, budgets[-1], kind]["accuracy"]) for kind in ago]
        cells += ["", ""] if policy == "oracle" else [f"{line['ttft_ms']:.1f}", f"{line['moved'] / 1e3:.0f}"]
        rows.append(_row(policy if policy == "oracle" else f"`{policy}`", *cells))
    return rows


def _interval(line: Line | None) -> str:
    if line is None:
        return "-"
    return f"{share(line['accuracy'])} [{share(line['ci_low'])}, {share(line['ci_high'])}]"


def _paired(line: Line) -> str:
    """A difference with its interval, signs before all."""
    value, low, high = (line[f"difference{end}"] for end in ("", "_low", "_high"))
    if value is None:  # what it is against has no room at that budget
        return "-"
    return f"{_signed(value)} [{_signed(low)}, {_signed(high)}]"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{share(abs(value))}"


def longrun(lines: Sequence[Line]) -> list[str]:
    """A hundred thousand frames, a row a mark: bytes, the time to the first token, and what is known by how long ago."""
    rows = _heads(
        "policy",
        "frames",
        "device KB",
        "host MB",
        "file MB",
        "first token, ms",
        "over the first",
        "KB moved",
        "right after",
    )
    for line in lines:
        if line.get("bench") == "longrun":
            sizes = [line["device_bytes"] / 1e3, line["host_bytes"] / 1e6, line["file_bytes"] / 1e6]
            cells = [f"{line['frames']:,}", *(f"{size:,.0f}" for size in sizes), f"{line['ttft_ms_p50']:.1f}"]
            cells += [share(line["ttft_ratio"]), f"{line['moved_bytes_per_question'] / 1e3:,.0f}"]
            right = ", ".join(f"{name} {of}" for name, of in line["right"].items() if name not in ("now", "never"))
            rows.append(_row(f"`{line['policy']}`", *cells, right))
    return rows


def compression(lines: Sequence[Line]) -> list[str]:
    """What a compression costs in plain reads of what it compresses, and numpy's time over ours, by policy; one thread.

    Of lines about the same the last: a quick one may stand before another.
    """

    def place(dtype: str) -> Line:
        return {"bench": "compression", "dtype": dtype, "threads": 1, "layers": 36}

    return _by_policy(
        lines,
        ("over one plain read of the same keys and values, fp32", place("fp32"), lambda line: line["pass_over_read"]),
        ("the same in fp16, which has half the bytes to read", place("fp16"), lambda line: line["pass_over_read"]),
        ("numpy's time over ours, fp32", place("fp32"), lambda line: line["reference_ms"] / line["ms"]),
    )


def shares(lines: Sequence[Line]) -> list[str]:
    """Compression's share of a frame's time once the memory is full, and that of guidance forwards, which is apart; percent."""
    rows: list[Row] = []
    for model, what in ((SEEDED, "LLaVA-OneVision-0.5B's decoder, no vision"), ("demo", "the demo")):
        place = {"bench": "share", "model": model}
        rows.append((f"{what}: compression", place, lambda line: 100 * line["share"]))
        rows.append((f"{what}: guidance", place, lambda line: 100 * line["guidance_ms"] / line["frame_ms"]))
    return _by_policy(lines, *rows)


def _by_policy(lines: Sequence[Line], *rows: Row) -> list[str]:
    """A column for each of POLICIES that has a line, a row for each of ``rows`` that has one."""
    found = {
        what: {str(line.get("policy")): line for line in lines if place.items() <= line.items()} for what, place, _ in rows
    }
    known = [name for name in POLICIES if any(name in there for there in found.values())]
    made = _heads("", *known)
    for what, _, value in rows:
        if there := found[what]:
            made.append(_row(what, *(plain(value(there[name])) if name in there else "-" for name in known)))
    return made


def prefill_pattern(lines: Sequence[Line]) -> list[str]:
    """A frame through layers of PureKV's sparse prefill beside dense ones: milliseconds of both, and the ratio in pairs."""
    rows = _heads("tokens held", "dense, ms a frame", "sparse", "times as fast")
    for line in lines:
        if line.get("bench") == "prefill-pattern":
            times = [f"{line[key]:.0f}" for key in ("dense_ms", "st_spattn_ms")]
            rows.append(_row(f"{line['held']:,}", *times, plain(line["ratio"])))
    return rows


def precision(lines: Sequence[Line]) -> list[str]:
    """What weight precisions cost and save beside fp32, of one checkpoint: agreement, KL, size; a column a precision."""
    own = [line for line in lines if line.get("bench") == "precision"]
    rows = _heads("", *(line["precision"].replace("+awq", ", `--scaling awq`") for line in own))
    if own:
        whole = max(own, key=lambda line: float(line["decoder_mb"]))  # whose ratio is rounded least
        rows.append(_row("same likeliest token", *(share(line["top1"], 3) for line in own)))
        rows.append(_row("mean KL, nats", *(share(line["kl"], 4) for line in own)))
        about = f"decoder, MB (fp32: {whole['decoder_mb'] / whole['size_over_fp32']:.0f})"
        rows.append(_row(about, *(f"{line['decoder_mb']:.0f}" for line in own)))
    return rows


def vision(lines: Sequence[Line]) -> list[str]:
    """A frame through a whole tower beside transformers, one at a time: ours over theirs, and the processor's time."""
    place = {"bench": "vision", "tower": TOWER, "batch": 1, "against": TRANSFORMERS}
    rows = _heads("tower", "threads", "precision", "time over transformers'", "processor time over theirs")
    for line in lines:
        if place.items() <= line.items() and line["layers"] > 20:
            spread = f"{share(line['ratio'])} [{share(line['low'])}, {share(line['high'])}]"
            rows.append(_row(TOWER, str(line["threads"]), line["precision"], spread, share(line["cpu_ratio"])))
    return rows


def _heads(*names: str) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def rounded(value: float) -> str:
    """One decimal of the number as it was printed, halves up: 7.05 is 7.1, whatever its nearest binary number is."""
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def share(value: float, digits: int = 2) -> str:
    """So many decimals, halves up, without the 0 before them."""
    found = str(Decimal(str(value)).quantize(Decimal(10) ** -digits, ROUND_HALF_UP))
    return found[1:] if found.startswith("0.") else found


def plain(value: float) -> str:
    """Two digits that count."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


TABLES: dict[str, Callable[[Sequence[Line]], list[str]]] = {
    "accuracy": accuracy,
    "compression": compression,
    "decode": decode,
    "longrun": longrun,
    "longstream": longstream,
    "precision": precision,
    "prefill-pattern": prefill_pattern,
    "share": shares,
    "stream": stream,
    "stream-against": against,
    "vision": vision,
}

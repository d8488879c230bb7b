"""``edgevlm bench stream``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Budget, Json, Threads
from edgevlm.errors import UserError

POLICIES = ["full", "auto", "infinipot-v", "hermes", "purekv"]
HEADS = (
    "frames", "peak MB", "cache MB", "fps", "cold ms/f", "TTFT p50", "p95", "cold TTFT", "TPOT p50", "tok/s", "compress %",
    "J/frame",
)  # fmt: skip


class Against(str, Enum):
    """Another runtime for the same stream."""

    transformers = "transformers"


class Attention(str, Enum):
    """How transformers computes it."""

    eager = "eager"
    sdpa = "sdpa"


def stream(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="demo|seeded-0.5b|BUNDLE", help="One or more. seeded-0.5b: no vision.", show_default="demo"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default=", ".join(POLICIES)),
    ] = None,
    budget: Budget = None,
    camera: Annotated[str | None, typer.Option(metavar="SRC", help="As for run.")] = None,
    video: Annotated[str | None, typer.Option(metavar="FILE", help="As for run; played again at its end.")] = None,
    fps: Annotated[float, typer.Option(help="Frames taken of a second of the stream.")] = 2.0,
    frames: Annotated[
        str | None, typer.Option(metavar="N,...", help="Where to measure.", show_default="16,64,256,512; --against: 24")
    ] = None,
    seconds: Annotated[
        str | None,
        typer.Option(metavar="S,...", help="Where to measure, in seconds of the stream.", show_default="100,300,500,600"),
    ] = None,
    chunk: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Frames encoded and appended at once.", show_default="8,16; --against: 4"),
    ] = None,
    questions: Annotated[int, typer.Option(help="Asked at each mark.", min=1)] = 5,
    answer_tokens: Annotated[int, typer.Option(help="Of an answer, at most.", min=2)] = 16,
    idle: Annotated[float, typer.Option(help="Seconds at rest in which power is measured first.", min=0)] = 10.0,
    against: Annotated[
        Against | None, typer.Option(help="Ours and another's, chunk by chunk in turn, on one llava_onevision checkpoint.")
    ] = None,
    precisions: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of ours, with --against: weights; the tower int8 beside whole numbers.")
    ] = "fp32,int8,int4",
    attention: Annotated[Attention, typer.Option(help="Of transformers, with --against.")] = Attention.sdpa,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what a stream takes as it grows: memory, speed, answers' times and energy, under each policy, full KV included.

    Each runs in a process of its own. A full KV that would not fit is not begun, and shown as such. --against transformers:
    frames and tokens a second beside infinipot-v:mode=official in transformers, float32, with --model CHECKPOINT
    (edgevlm bench checkpoint writes one of random weights).
    """
    from edgevlm.apps.run.launch import parse_count

    if not 0 < fps <= 1000:
        raise UserError(f"--fps {fps:g}: give a rate above 0, up to 1000")
    beside = against is not None
    counts = _numbers("--frames", frames if frames is not None else "24" if beside else "16,64,256,512")
    times = _numbers("--seconds", seconds if seconds is not None else "" if beside else "100,300,500,600")
    marks = sorted({*counts, *(round(s * fps) for s in times)} - {0})
    if not marks:
        raise UserError("give --frames or --seconds: there is nothing to measure")
    chunks = _numbers("--chunk", chunk if chunk is not None else "4" if beside else "8,16")
    if not chunks:
        raise UserError("--chunk: give frames, such as 8,16")
    options: dict[str, Any] = {
        "budget": None if budget is None else parse_count(budget), "marks": tuple(marks), "fps": fps, "camera": camera,
        "video": video, "questions": questions, "answer_tokens": answer_tokens, "threads": threads,
    }  # fmt: skip
    if beside:
        _beside(model or [], policy, chunks, precisions, attention, options, as_json)
        return
    from edgevlm.bench.stream.desk import run

    _print(run(model or ["demo"], policy or POLICIES, chunks, idle, _progress, **options), as_json)


def _beside(
    models: list[str], policy: list[str] | None, chunks: list[int], precisions: str, attention: Attention,
    options: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Ours beside transformers: one model, one policy, one size of chunk."""
    from edgevlm.bench.stream.sitting import Work
    from edgevlm.packages import needed

    bench = needed("edgevlm.bench.stream.beside", "comparing with transformers")
    if len(models) != 1 or len(chunks) != 1:
        raise UserError("--against: give one --model CHECKPOINT and one --chunk; edgevlm bench checkpoint --out DIR makes one")
    if policy not in (None, [bench.POLICY]):
        raise UserError(f"--against: the policy of both is {bench.POLICY}; leave --policy out")
    names = [name.strip() for name in precisions.split(",") if name.strip()]
    if not names:
        raise UserError("--precisions: give some, such as fp32,int8,int4")
    work = Work(model=models[0], policy=bench.POLICY, chunk=chunks[0], **options)
    for line in bench.beside(models[0], names, attention.value, work, _progress):
        typer.echo(json.dumps(line) if as_json else _said(line))


def _said(line: dict[str, Any]) -> str:
    """A line of ``--against`` in words."""
    place = f"{line['runtime']:<14}{line['precision']:<6}"
    if "fps_ratio" in line:
        tokens = "tokens a second not known"
        if line["tokens_ratio"]:
            tokens = f"tokens a second {line['tokens_ratio']:.2f} [{line['tokens_low']:.2f}, {line['tokens_high']:.2f}]"
        return (
            f"{place}over transformers: frames a second {line['fps_ratio']:.2f} [{line['low']:.2f}, {line['high']:.2f}], "
            f"processor {line['cpu_ratio']:.2f}; {tokens}; same answers {line['same_answers']} of {line['answers']}"
        )
    rate = "-" if line["tokens_per_s"] is None else f"{line['tokens_per_s']:.2f}"
    return (
        f"{place}{line['fps']:.3f} fps; {line['ms_per_frame']:.0f} ms [{line['low']:.0f}, {line['high']:.0f}] a frame, first "
        f"{line['cold_ms_per_frame']:.0f}: vision {line['vision_ms']:.0f}, prefill {line['prefill_ms']:.0f}, compression "
        f"{line['compress_ms']:.1f}; {rate} tokens/s, first token {line['ttft_ms']:.0f} ms, "
        f"the very first {line['cold_ttft_ms']:.0f}"
    )


def _progress(what: str) -> None:
    typer.echo(what, err=True)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(not part.isdecimal() or not int(part) for part in parts):
        raise UserError(f"{option} {text!r}: give whole numbers of 1 or more with commas between them")
    return [int(part) for part in parts]


def _print(lines: Iterable[dict[str, Any]], as_json: bool) -> None:
    shown: tuple[Any, ...] | None = None
    for line in lines:
        if as_json:
            typer.echo(json.dumps(line))
            continue
        place = line["model"], line["policy"], line["chunk"]
        if place != shown:
            typer.echo(f"{line['model']}, {line['policy']}, chunks of {line['chunk']}")
            typer.echo("".join(f"{head:>11}" for head in HEADS))
            shown = place
        if "stopped" in line:
            typer.echo(f"{line['frames']:>11}  {'OOM' if line['oom'] else 'stopped'}: {line['stopped']}")
            continue
        share = 100 * line["compress_share"]
        cells = (
            line["peak_rss_mb"], line["cache_mb"], line["fps"], line["cold_ms_per_frame"], line["ttft_ms_p50"],
            line["ttft_ms_p95"], line["cold_ttft_ms"], line["tpot_ms_p50"], line["tokens_per_s"], share,
            line["joules_per_frame"],
        )  # fmt: skip
        typer.echo(f"{line['frames']:>11}" + "".join(f"{'-':>11}" if cell is None else f"{cell:>11.2f}" for cell in cells))

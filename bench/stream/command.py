"""``edgevlm bench stream``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.typed import Budget, Json, Threads
from edgevlm.errors import UserError

POLICIES = ["full", "auto", "infinipot-v", "hermes", "purekv"]
HEADS = ("frames", "peak MB", "cache MB", "fps", "TTFT p50", "p95", "TPOT p50", "tok/s", "compress %", "J/frame")


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
    frames: Annotated[str, typer.Option(metavar="N,...", help="Where to measure.")] = "16,64,256,512",
    seconds: Annotated[
        str, typer.Option(metavar="S,...", help="Where to measure, in seconds of the stream.")
    ] = "100,300,500,600",
    chunk: Annotated[str, typer.Option(metavar="N,...", help="Frames encoded and appended at once.")] = "8,16",
    questions: Annotated[int, typer.Option(help="Asked at each mark.", min=1)] = 5,
    answer_tokens: Annotated[int, typer.Option(help="Of an answer, at most.", min=2)] = 16,
    idle: Annotated[float, typer.Option(help="Seconds at rest in which power is measured first.", min=0)] = 10.0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what a stream takes as it grows: memory, speed, answers' times and energy, under each policy, full KV included.

    Each runs in a process of its own. A full KV that would not fit is not begun, and shown as such.
    """
    from edgevlm.apps.start import parse_count
    from edgevlm.bench.stream.desk import run

    if not 0 < fps <= 1000:
        raise UserError(f"--fps {fps:g}: give a rate above 0, up to 1000")
    marks = sorted({*_numbers("--frames", frames), *(round(s * fps) for s in _numbers("--seconds", seconds))} - {0})
    if not marks:
        raise UserError("give --frames or --seconds: there is nothing to measure")
    chunks = _numbers("--chunk", chunk)
    if not chunks:
        raise UserError("--chunk: give frames, such as 8,16")
    lines = run(
        model or ["demo"], policy or POLICIES, chunks, idle, lambda what: typer.echo(what, err=True),
        budget=None if budget is None else parse_count(budget), marks=tuple(marks), fps=fps, camera=camera, video=video,
        questions=questions, answer_tokens=answer_tokens, threads=threads,
    )  # fmt: skip
    _print(lines, as_json)


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
            line["peak_rss_mb"], line["cache_mb"], line["fps"], line["ttft_ms_p50"], line["ttft_ms_p95"], line["tpot_ms_p50"],
            line["tokens_per_s"], share, line["joules_per_frame"],
        )  # fmt: skip
        typer.echo(f"{line['frames']:>11}" + "".join(f"{'-':>11}" if cell is None else f"{cell:>11.2f}" for cell in cells))

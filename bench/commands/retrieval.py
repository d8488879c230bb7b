"""``edgevlm bench retrieval``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json, Threads
from edgevlm.runtime.store.store import MIN_BYTES

CHUNK = 8


def retrieval(
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:K=V,...]", help="Policies that retrieve, parted by commas.", show_default="resv"),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(metavar="demo|BUNDLE", help="One or more.", show_default="demo")] = None,
    budget: Annotated[str | None, typer.Option(metavar="N|6k", help="Vision tokens per layer.", show_default="as run")] = None,
    frames: Annotated[int, typer.Option(help="Of the demo's world, watched before the questions.", min=1)] = 1024,
    questions: Annotated[int, typer.Option(help="Asked after them, and one that does not count.", min=1)] = 6,
    chunk: Annotated[int, typer.Option(help="Frames encoded and appended at once.", min=1)] = CHUNK,
    host_bytes: Annotated[
        int | None, typer.Option(help="Of blocks in host memory.", min=MIN_BYTES, show_default="as run")
    ] = None,
    cold: Annotated[bool, typer.Option(help="Before a question the kernel forgets what it has of the store's file.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what retrieval policies fetch of what they hold, in every layer and KV head, and what it costs beside a plain window.

    Ratios are of rows, in prefill, question and answer; the shares are of what prediction, fetching and the graphs take.
    """
    from edgevlm.apps.run.launch import parse_count
    from edgevlm.bench.retrieval import Stream, run
    from edgevlm.calib.accuracy.variants import split

    policies = [name for text in policy or ["resv"] for name in split(text)]
    tokens = parse_count(budget) if budget is not None else None
    stream = Stream(tokens, frames, questions, chunk, host_bytes, cold)
    lines = run(model or ["demo"], policies, stream, threads, lambda what: typer.echo(what, err=True))
    for line in lines:
        typer.echo(json.dumps(line) if as_json else "\n".join(table(line)))


def table(line: dict[str, Any]) -> list[str]:
    """A line as text: a row for each phase, then the rows fetched by layer and head."""
    heads = ("fetched", "attended", "rule", "predict", "fetch", "compute", "ms/call")
    moved = line["bytes_per_question"] / 1e6
    text = [
        f"{line['model']}, {line['policy']}: {line['frames']:,} frames, budget {line['budget']:,} "
        f"(window {line['window_rows']:,}, working set {line['working_rows']:,}), {line['below_rows']:,} rows below",
        f"  frame {line['frame_ms']:.2f} ms, {line['frame_over_window']:.2f} of a plain window's; first token "
        f"{line['ttft_ms']:.1f} ms, {line['ttft_over_window']:.2f}; {moved:.2f} MB from the store a question, "
        f"{line['disk_bytes_per_question'] / 1e6:.2f} of them from its file",
        f"  rows cut {line['cut_rows']:,}, merged {line['merged']:,}, blocks lost {line['lost']:,}",
        f"  {'':<10}{''.join(f'{head:>10}' for head in heads)}",
    ]
    for phase, shares in line["shares"].items():
        ratios = (line[f"{phase}_{way}"] for way in ("ratio", "attended", "rule"))
        cells = [*(percent(ratio) for ratio in ratios), *(percent(shares.get(part)) for part in heads[3:6])]
        text.append(f"  {phase:<10}{''.join(cells)}{sum(line['call_ms'][phase].values()):>10.2f}")
    for phase, layers in line["heads"]["fetched"].items():
        rows = "; ".join(" ".join(percent(ratio).strip() for ratio in of_layer) for of_layer in layers)
        text.append(f"  {phase}, fetched by layer and head: {rows}")
    return text


def percent(share: float | None) -> str:
    return f"{'-' if share is None else f'{100 * share:.1f} %':>10}"

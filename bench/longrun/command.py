"""``edgevlm bench longrun``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.bench.child import child, lines
from edgevlm.bench.longrun.sitting import Work
from edgevlm.calib.accuracy.variants import split
from edgevlm.progress import progress
from edgevlm.runtime.policies import create_policy

COMMAND = [sys.executable, "-m", "edgevlm.bench.longrun.sitting"]
LEAST = 200  # frames to the first mark: a visitor must have time to come and go
HEADS = (
    "frames", "device KB", "host MB", "file MB", "RSS MB", "fps", "TTFT p50", "x first", "KB moved", "backward",
)  # fmt: skip


def longrun(
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:K=V,...],...", show_default="rekv,hybrid,last-seen,sliding-window")
    ] = None,
    frames: Annotated[int, typer.Option(help="Of the stream. Marks: these, a tenth, a hundredth.", min=LEAST)] = 100_000,
    budget: Annotated[int, typer.Option(help="Vision tokens per layer on the device, whatever the policy.", min=64)] = 512,
    seed: Annotated[int, typer.Option(help="Of the stream.", min=0)] = 0,
    host_bytes: Annotated[int, typer.Option(help="Of host memory below the device.", min=1_000_000)] = 256_000_000,
    file_bytes: Annotated[int, typer.Option(help="Of the file below that; 0: none.", min=0)] = 8_000_000_000,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append each line as it comes, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Take policies through a stream of a hundred thousand frames: bytes on the device, in host memory and on disk, the time to
    the first token as the stream grows, and what is still known of the recent and the distant past.

    Each policy in a process of its own, one after the other. Every frame is drawn and encoded.
    """
    marks = tuple(sorted({mark for mark in (frames // 100, frames // 10, frames) if mark >= LEAST}))
    entries = [name for text in policy or ["rekv,hybrid,last-seen,sliding-window"] for name in split(text)]
    for name in entries:
        create_policy(name)
    if not as_json:
        typer.echo("".join(f"{head:>11}" for head in HEADS))
    with progress("loading the model") as step:
        for name in entries:
            first: float | None = None
            if not as_json:
                typer.echo(name)
            for line in run(Work(name, budget, marks, seed, host_bytes, file_bytes), step):
                first = first or line["ttft_ms_p50"]
                line["ttft_ratio"] = round(line["ttft_ms_p50"] / first, 3)
                typer.echo(json.dumps(line) if as_json else row(line))
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(line) + "\n")


def run(work: Work, progress: Callable[[str, int, int], None]) -> Iterator[dict[str, Any]]:
    """The lines of one policy's process. Raises UserError for what it says the user did wrong."""
    with child(COMMAND, asdict(work)) as process:
        for line in lines(process):
            if "frames_done" in line:
                progress(work.policy, line["frames_done"], work.marks[-1])
            else:
                yield line
    if process.returncode:
        raise RuntimeError(f"{work.policy}: its process ended with code {process.returncode}")


def row(line: dict[str, Any]) -> str:
    """A mark's figures for people; below them the share right by how long ago it was."""
    cells = (
        f"{line['frames']}", f"{line['device_bytes'] / 1e3:.0f}", f"{line['host_bytes'] / 1e6:.1f}",
        f"{line['file_bytes'] / 1e6:.0f}", f"{line['rss_bytes'] / 1e6:.0f}", f"{line['fps']:.0f}", f"{line['ttft_ms_p50']:.2f}",
        f"{line['ttft_ratio']:.2f}", f"{line['moved_bytes_per_question'] / 1e3:.0f}", f"{line['backward']:.3f}",
    )  # fmt: skip
    right = ", ".join(f"{name} {of}" for name, of in line["right"].items())
    return "".join(f"{cell:>11}" for cell in cells) + f"   {right}"

"""The options of ``edgevlm bench accuracy``: the demo world's suites, and the published benchmarks."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.bench.suites import SUITES
from edgevlm.errors import UserError

DEMO = ("streamqa", "streamqa-hard", "longstream")
LONG = "256,512"
SHARES = "50%,25%,12.5%,6.25%,3%"
DEMO_ALONE = ("frames", "streams", "seed", "against", "turns", "plot")
PUBLISHED_ALONE = ("data", "fps", "judge_url", "judge_model")

Suite = Enum("Suite", {name: name for name in (*DEMO, *SUITES)}, type=str)  # type: ignore[misc]


def accuracy(
    context: typer.Context,
    suite: Annotated[
        Suite,
        typer.Option(
            help="streamqa: the demo world's questions, with what shows the answers; hard: its background moves and is cut, "
            "more happens. longstream: what was last shown up to thousands of frames ago. The others: published benchmarks, of "
            "--data."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="all|ablations|NAME[:K=V,...],...",
            help="all: every policy and the oracle; ablations: the papers'. NAME@eager re-indexes at each compression.",
            show_default="all",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="P%,...|3k,6k",
            help="streamqa: shares of the vision tokens of a whole stream; longstream, published: vision tokens per layer.",
            show_default=f"{SHARES}; longstream: {LONG}; published: 6k",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where a published benchmark was downloaded to.")] = None,
    fps: Annotated[float, typer.Option(help="Frames a second of a published benchmark's videos.")] = 1.0,
    judge_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Judges open answers: an OpenAI-compatible endpoint, up to /v1. Key: EDGEVLM_JUDGE_KEY.",
            show_default="off",
        ),
    ] = None,
    judge_model: Annotated[str | None, typer.Option(metavar="NAME", help="The judge's model.")] = None,
    frames: Annotated[int, typer.Option(help="Of a stream.", min=4)] = 64,
    streams: Annotated[int, typer.Option(help="How many.", min=1)] = 200,
    seed: Annotated[str, typer.Option(metavar="N|test", help="Of the streams; test: seeds kept for reports alone.")] = "0",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The policy that paired differences are to.", show_default="infinipot-v, or the first there is"
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="demo|BUNDLE", help="streamqa: a model that knows the demo world; published: any.")
    ] = "demo",
    turns: Annotated[int, typer.Option(help="Questions to one memory, each compared with asking it alone; 0: off.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the work done, a JSON line a piece.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the work in --out.")] = False,
    workers: Annotated[int, typer.Option(help="Processes; streamqa's have one thread each.", min=1, max=256)] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw accuracy against budget, and what was kept of one stream.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask every policy at every budget the same questions about the same streams, and say who still knows what happened.

    All get equal bytes. streamqa splits questions about before by the quarter of the stream that last showed the answer. A
    published benchmark has its own table; each video is decoded once, and a question sees what came before its time.
    """
    published = suite.value in SUITES
    _refuse(context, suite.value, DEMO_ALONE if published else PUBLISHED_ALONE)
    if published:
        from edgevlm.bench.suites.command import SuiteRequest, start_suite

        asked = SuiteRequest(
            suite=suite.value, data=data, model=model, policy=policy or ["all"], budget=budget, fps=fps, out=out, resume=resume,
            workers=workers, judge_url=judge_url, judge_model=judge_model, as_json=as_json,
        )  # fmt: skip
        typer.echo(start_suite(asked))
        return
    from edgevlm.bench.accuracy.command import AccuracyRequest, start

    usual = LONG if suite.value == "longstream" else SHARES
    request = AccuracyRequest(
        suite=suite.value, model=model, policy=policy or ["all"], budget=budget or usual, frames=frames, streams=streams,
        seed=seed, against=against, turns=turns, out=out, resume=resume, workers=workers, plot=plot, as_json=as_json,
    )  # fmt: skip
    typer.echo(start(request))


def _refuse(context: typer.Context, suite: str, names: tuple[str, ...]) -> None:
    """Raise UserError for an option of the other kind of suite that was typed."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')}: is not for --suite {suite}; leave it out")

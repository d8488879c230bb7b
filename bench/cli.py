"""``edgevlm bench``: performance and accuracy as commands."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.bench import speed

Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores", min=1, max=256)]
Budget = Annotated[
    str | None, typer.Option(metavar="N|6k", help="Vision tokens per layer.", show_default="6144; others: as run")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]

app = typer.Typer(help="Measure what edgevlm claims.", no_args_is_help=True)
for command in (speed.decode, speed.prefill, speed.vision):
    app.command()(command)


class KV(str, Enum):
    """Of keys and values."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class Suite(str, Enum):
    """Of questions."""

    streamqa = "streamqa"
    streamqa_hard = "streamqa-hard"


@app.callback()
def _bench() -> None:
    pass


@app.command()
def compression(
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default="every bounded policy")
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = 36,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=2)] = 128,
    tokens: Annotated[int, typer.Option(help="Held in each layer.", min=1)] = 6076,
    dtype: Annotated[list[KV] | None, typer.Option(help="Of keys and values.", show_default="all")] = None,
    threads: Annotated[int, typer.Option(help="That kernels use.", min=1, max=256)] = 1,
    rounds: Annotated[int, typer.Option(help="Medians are taken over as many.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Time each policy's compression beside a numpy rendition and beside one plain read of all keys and values."""
    from edgevlm.bench.compression import Shape, run

    head = f"{'policy':<24}{'dtype':>6}{'ms':>10}{'read ms':>10}{'pass/read':>11}{'numpy ms':>11}"
    if not as_json:
        typer.echo(f"{layers} layers x {kv_heads} KV heads x {tokens} tokens x {head_dim}, threads: {threads}\n{head}")
    dtypes = [kind.value for kind in dtype or KV]
    for result in run(policy or [], Shape(layers, kv_heads, head_dim, tokens), dtypes, threads, rounds):
        line = result.line()
        typer.echo(
            json.dumps(line) if as_json else f"{result.policy:<24}{result.dtype:>6}{result.ms:>10.2f}{result.read_ms:>10.2f}"
            f"{line['pass_over_read']:>11.2f}{result.reference_ms:>11.1f}"
        )  # fmt: skip


@app.command("prefill-pattern")
def prefill_pattern(
    held: Annotated[
        list[int] | None, typer.Option(help="Vision tokens in the memory; one or more.", show_default="6144 and 24576", min=1)
    ] = None,
    frames: Annotated[int, typer.Option(help="Of 196 tokens, in one call.", min=1)] = 1,
    layers: Annotated[int, typer.Option(help="Of LLaVA-OneVision-0.5B's shape.", min=1)] = 8,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(help="Pairs of calls that medians are taken over.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Time a frame's prefill through PureKV's ST-SpAttn graph beside dense prefill, in pairs.

    The weights are random. With the defaults it takes 2 GB of memory, half a GB of disk for a while and about a minute.
    """
    from edgevlm.bench import writing

    bench = writing("edgevlm.bench.st_spattn")
    lines = bench.prefill_pattern(held=held or bench.HELD, frames=frames, layers=layers, threads=threads, repeats=repeats)
    for number, line in enumerate(lines):
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            rows = f"{frames} x {line['tokens_per_frame']} rows"
            typer.echo(f"{layers} layers, sparse from layer {line['st_spattn_from']}; {rows}")
            typer.echo(f"{'held':>8}{'dense ms':>11}{'ST-SpAttn ms':>14}{'dense/sparse':>14}")
        typer.echo(f"{line['held']:>8}{line['dense_ms']:>11.1f}{line['st_spattn_ms']:>14.1f}{line['ratio']:>14.2f}")


@app.command()
def share(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="seeded-0.5b|demo|BUNDLE",
            help="One or more. seeded-0.5b: LLaVA-OneVision-0.5B's decoder, random weights, filled with noise; no vision.",
            show_default="seeded-0.5b, demo",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default="infinipot-v, hermes, purekv"),
    ] = None,
    budget: Budget = None,
    frames: Annotated[
        int | None, typer.Option(help="Measured; on to the end of a cycle.", show_default="16; demo: 1024", min=1)
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what a frame's time goes to once the memory is full, and compression's share of it.

    Guidance is apart. seeded-0.5b takes 3 GB of memory, 1.5 GB of disk for a while, and 2 minutes a policy on one core.
    """
    from edgevlm.apps.start import parse_count
    from edgevlm.bench.share import PARTS, SEEDED, run

    heads = ("frame ms", "fps", *(name.removesuffix("_ms") for name in PARTS), "share %")
    names, policies = model or [SEEDED, "demo"], policy or ["infinipot-v", "hermes", "purekv"]
    tokens = parse_count(budget) if budget is not None else None
    results = run(names, policies, tokens, frames, threads, lambda what: typer.echo(what, err=True))
    for number, result in enumerate(results):
        line = result.line()
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'model':<14}{'policy':<24}{'budget':>8}{''.join(f'{head:>10}' for head in heads)}")
        numbers = (line["frame_ms"], line["fps"], *(line[name] for name in PARTS), 100 * line["share"])
        cells = "".join(f"{'-':>10}" if value is None else f"{value:>10.3f}" for value in numbers)
        typer.echo(f"{result.model:<14}{result.policy:<24}{result.budget:>8}{cells}")


@app.command()
def camera(
    camera: Annotated[str | None, typer.Option(metavar="SRC", help="As for run.", show_default="demo")] = None,
    video: Annotated[str | None, typer.Option(metavar="FILE", help="As for run.")] = None,
    model: Annotated[str, typer.Option(metavar="demo|BUNDLE")] = "demo",
    frames: Annotated[int, typer.Option(help="Measured, after two that are not.", min=1)] = 20,
    fps: Annotated[float, typer.Option(help="Frames a second taken from the source.")] = 2.0,
    realtime: Annotated[
        bool, typer.Option("--realtime/--no-realtime", help="Play what is recorded at its own speed, as a camera would.")
    ] = True,
    inline: Annotated[bool, typer.Option("--inline", help="Prepare frames in the thread that watches, to compare.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say how long a frame takes from the source to an answer that has seen it, stage by stage."""
    from edgevlm.apps.sources import SourceOptions
    from edgevlm.bench.camera import CameraBench, run

    options = SourceOptions(fps=fps, realtime=realtime)
    for number, stage in enumerate(run(CameraBench(camera, video, model, frames, inline, threads, options))):
        if as_json:
            typer.echo(json.dumps(stage.line()))
            continue
        if number == 0:
            typer.echo(f"{stage.source}, {stage.frames} frames\n{'stage':<12}{'ms p50':>10}{'ms p95':>10}")
        typer.echo(f"{stage.stage:<12}{stage.ms_p50:>10.2f}{stage.ms_p95:>10.2f}")


@app.command()
def snapshot(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="seeded-0.5b|demo|BUNDLE", help="One or more, as for share.", show_default="seeded-0.5b, demo"),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:K=V,...]", help="One or more.", show_default="infinipot-v, h2o")
    ] = None,
    budget: Budget = None,
    rounds: Annotated[int, typer.Option(help="Medians are taken over as many.", min=1)] = 7,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write there, and remove it again.", show_default="/tmp")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say how long a snapshot holds the stream, beside a frame's time, and how long it then takes to be on disk."""
    from edgevlm.apps.start import parse_count
    from edgevlm.bench.share import SEEDED
    from edgevlm.bench.snapshot import run

    tokens = parse_count(budget) if budget is not None else None
    names, policies = model or [SEEDED, "demo"], policy or ["infinipot-v", "h2o"]
    heads = ("MB", "frame ms", "hold ms", "hold/frame", "write ms")
    results = run(names, policies, tokens, rounds, threads, out, lambda what: typer.echo(what, err=True))
    for number, result in enumerate(results):
        line = result.line()
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'model':<14}{'policy':<16}{'budget':>8}{''.join(f'{head:>12}' for head in heads)}")
        figures = (result.bytes / 1e6, line["frame_ms"], line["hold_ms"], line["hold_over_frame"], line["write_ms"])
        typer.echo(f"{result.model:<14}{result.policy:<16}{result.budget:>8}{''.join(f'{x:>12.3f}' for x in figures)}")


@app.command()
def accuracy(
    suite: Annotated[
        Suite,
        typer.Option(
            help="The demo world's questions, with what shows the answers; hard: its background moves and is cut, more happens."
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
        str, typer.Option(metavar="P%,...", help="Shares of the vision tokens of a whole stream.")
    ] = "50%,25%,12.5%,6.25%,3%",
    frames: Annotated[int, typer.Option(help="Of a stream.", min=4)] = 64,
    streams: Annotated[int, typer.Option(help="How many.", min=1)] = 200,
    seed: Annotated[str, typer.Option(metavar="N|test", help="Of the streams; test: seeds kept for reports alone.")] = "0",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The policy that paired differences are to.", show_default="infinipot-v, or the first there is"
        ),
    ] = None,
    model: Annotated[str, typer.Option(metavar="demo|BUNDLE", help="A model that knows the demo world.")] = "demo",
    turns: Annotated[int, typer.Option(help="Questions to one memory, each compared with asking it alone; 0: off.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the work done, a JSON line a piece.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the work in --out.")] = False,
    workers: Annotated[int, typer.Option(help="Processes, of one thread each.", min=1, max=256)] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw accuracy against budget, and what was kept of one stream.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask every policy at every budget the same questions about the same streams, and say who still knows what happened.

    All get equal bytes. Questions about before are also split by the quarter of the stream that last showed the answer.
    """
    from edgevlm.bench.accuracy.command import Request, start

    typer.echo(
        start(
            Request(
                suite=suite.value, model=model, policy=policy or ["all"], budget=budget, frames=frames, streams=streams,
                seed=seed, against=against, turns=turns, out=out, resume=resume, workers=workers, plot=plot, as_json=as_json,
            )
        )
    )  # fmt: skip


@app.command()
def precision(
    model: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="A checkpoint directory, as for export.")],
    precisions: Annotated[
        str, typer.Option(metavar="NAME,...", help="As for export --precision; int4+awq: with --scaling awq.")
    ] = "fp32,fp16,int8,int4,int4-zp,int4+awq",
    tokens: Annotated[int, typer.Option(help="Of text that both are made to read.", min=1, max=20000)] = 2000,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare weight precisions with fp32: how often the same token is likeliest, KL in nats, size, milliseconds a token.

    The text is Python's own help topics. Each precision is exported into a temporary folder.
    """
    from edgevlm.bench import writing

    bench = writing("edgevlm.bench.precision")
    results = bench.run(model, precisions.split(","), tokens, threads, lambda what: typer.echo(what, err=True))
    for number, result in enumerate(results):
        line = result.line()
        if as_json:
            typer.echo(json.dumps(line))
            continue
        if number == 0:
            typer.echo(f"{'precision':<12}{'top-1':>8}{'KL':>10}{'MB':>9}{'/fp32':>7}{'ms':>8}{'fp32 ms':>9}")
        typer.echo(
            f"{result.precision:<12}{line['top1']:>8.4f}{line['kl']:>10.5f}{line['decoder_mb']:>9.1f}"
            f"{line['size_over_fp32']:>7.3f}{line['ms_per_token']:>8.2f}{line['fp32_ms_per_token']:>9.2f}"
        )


@app.command("kv-precision")
def kv_precision(
    model: Annotated[list[str], typer.Option(metavar="BUNDLE", help="Exported with --kv int8 or fp16; one or more.")],
    tokens: Annotated[int, typer.Option(help="Teacher-forced.", min=2)] = 2000,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to force.", show_default="what the model says, fixed seed")
    ] = None,
    turns: Annotated[int, typer.Option(help="Of all keys before each 64 tokens, as re-indexing turns them.", min=0)] = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare a bundle's KV precision with an fp32 cache, on the same weights and text: KL, top-1 agreement, bytes."""
    from rich.console import Console

    from edgevlm.bench.kv_precision import run

    with Console(stderr=True).status("loading the model") as status:
        for result in run(model, tokens, text, turns, threads, status.update):
            line = result.line()
            typer.echo(json.dumps(line) if as_json else "  ".join(f"{name} {value}" for name, value in line.items()))

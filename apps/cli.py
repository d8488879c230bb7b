"""The command line: ``edgevlm run``, ``export``, ``calibrate``, ``policies`` and ``bench``."""

from __future__ import annotations

import os
import signal
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from edgevlm import __version__
from edgevlm.apps.sources.base import mask_credentials
from edgevlm.bench.cli import app as bench
from edgevlm.errors import UserError

app = typer.Typer(
    name="edgevlm",
    help="Watch a camera within a fixed memory budget and answer questions about what it saw.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EDGEVLM"},
    epilog="Every option can also be set in the environment, EDGEVLM_RUN_MODEL for run's --model and so on.",
)

RUN_EXAMPLES = """
[bold]Examples[/bold]

  edgevlm run                                             the demo camera, with questions and the truth

  edgevlm run --frames 64 --ask "how many objects are there now?" --json

  edgevlm run --camera 0 --model BUNDLE                   ask at the prompt while it watches

  edgevlm run --video shop.mp4 --model BUNDLE --ask-at 60:"Who came in?" --budget 6k
"""

app.add_typer(bench, name="bench")


class Reindexing(str, Enum):
    """When kept positions are made dense."""

    LAZY = "lazy"
    EAGER = "eager"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgevlm {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command(epilog=RUN_EXAMPLES)
def run(
    camera: Annotated[
        str | None, typer.Option(metavar="SRC", help="demo, an index like 0, /dev/videoN, or a URL.", show_default="demo")
    ] = None,
    video: Annotated[str | None, typer.Option(metavar="FILE", help="A video file.")] = None,
    model: Annotated[str, typer.Option(metavar="demo|BUNDLE", help="The embedded demo model, or an exported bundle.")] = "demo",
    policy: Annotated[
        str,
        typer.Option(metavar="NAME[:K=V,...]", help="How the memory is kept small; `edgevlm policies` lists the ways."),
    ] = "infinipot-v",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|6k",
            help="Vision tokens held per layer.",
            show_default="half of the model's trained length, 6k at most; all that fits for full",
        ),
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames a second taken from the source, by its own timestamps.")] = 2.0,
    chunk: Annotated[int, typer.Option(help="Frames encoded and added to the memory at once.", min=1)] = 8,
    reindexing: Annotated[
        Reindexing, typer.Option(help="Make kept positions dense near the model's limit, or at every compression.")
    ] = Reindexing.LAZY,
    realtime: Annotated[
        bool | None,
        typer.Option(
            "--realtime/--no-realtime",
            help="Play a file or the demo at its own speed. [default: the demo on a terminal]",
        ),
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Stop after this many frames.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop at this time of the stream.", min=0)] = None,
    ask: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A question for the end of the stream.")] = None,
    ask_at: Annotated[
        list[str] | None, typer.Option(metavar="S:TEXT", help="A question asked at S seconds of the stream.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The demo world's seed.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
    questions: Annotated[bool, typer.Option("--questions", help="List what the demo model can be asked, and exit.")] = False,
) -> None:
    """Watch a stream and answer questions about it, on a terminal while it plays.

    The demo without a terminal ends after 64 frames. Ctrl-C ends any run with its summary.
    """
    from edgevlm.apps.start import RunRequest, list_questions, start

    if questions:
        typer.echo("\n".join(list_questions()))
        return
    start(
        RunRequest(
            camera=camera, video=video, model=model, policy=policy, budget=budget, fps=fps, chunk=chunk, realtime=realtime,
            reindexing=reindexing.value, frames=frames, seconds=seconds, ask=ask or [], ask_at=ask_at or [], seed=seed,
            threads=threads, as_json=as_json,
        )
    )  # fmt: skip


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face checkpoint directory, as save_pretrained writes it.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The bundle to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
    st_spattn: Annotated[
        int | None,
        typer.Option(
            metavar="LAYER",
            help="The first layer that prefills sparsely when a policy asks for PureKV's ST-SpAttn.",
            show_default="3",
            min=0,
        ),
    ] = None,
) -> None:
    """Turn a checkpoint into a bundle that edgevlm runs: ONNX graphs, weights, tokenizer, manifest."""
    from rich.console import Console

    from edgevlm.export import export_checkpoint

    with Console(stderr=True).status("reading the checkpoint") as status:
        path = export_checkpoint(checkpoint, out, progress=status.update, force=force, st_spattn_from=st_spattn)
    typer.echo(str(path))


@app.command()
def calibrate(
    bundle: Annotated[str, typer.Argument(metavar="demo|BUNDLE", help="The model to measure.")],
    video: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A clip to measure on; once or more.", show_default="the demo world, for demo"),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(help="Frames of each clip.", show_default="all that the model holds, 6,000 tokens at most", min=1),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a calibrated copy and leave the bundle as it is.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|png", help="Draw the attention of each layer over age.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure what the policies need to know of a model, and write it into its bundle.

    The thresholds of infinipot-v's windows, the layer classes of hermes, the agreement of layers that purekv stands on.
    """
    from rich.console import Console

    from edgevlm.apps import calibrate as command

    with Console(stderr=True).status("starting") as status:
        result = command.start(command.CalibrateRequest(bundle, video or [], frames, out, plot, threads), status.update)
    typer.echo((command.as_json if as_json else command.describe)(*result))


@app.command()
def policies(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """List the policies of --policy: paper, settings with their defaults, and what is not as the paper has it."""
    from edgevlm.apps.policies import list_policies

    typer.echo(list_policies(as_json))


def main() -> None:
    """Entry point: what the user did wrong is one line and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except UserError as error:
        typer.echo(f"edgevlm: {mask_credentials(str(error))}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)

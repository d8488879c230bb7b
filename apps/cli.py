"""The command line: ``edgevlm run``, ``export``, ``calibrate``, ``plan``, ``doctor`` and others."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from edgevlm import __version__
from edgevlm.apps import options
from edgevlm.apps.sources.base import SourceOptions, mask_credentials
from edgevlm.apps.title import mask_title
from edgevlm.bench.cli import KV, Threads
from edgevlm.bench.cli import app as bench
from edgevlm.errors import UserError
from edgevlm.runtime.auto import AUTO

ClickException: type[Exception] = typer.BadParameter.__mro__[2]  # click's, or that of the click which typer brings along


app = typer.Typer(
    name="edgevlm",
    help="Watch a camera within a fixed memory budget and answer questions about what it saw.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EDGEVLM"},
    epilog="Every option can also be set in the environment, EDGEVLM_RUN_MODEL for run's --model and so on; "
    "EDGEVLM_RUN_ASK, EDGEVLM_RUN_ASK_AT and EDGEVLM_CALIBRATE_ASK take one question a line.",
)

RUN_EXAMPLES = """
[bold]Examples[/bold]

  edgevlm run                                             the demo camera, with questions and the truth

  edgevlm run --frames 64 --ask "how many objects are there now?" --json

  edgevlm run --camera 0 --size 1280x720 --model BUNDLE   ask at the prompt while it watches

  edgevlm run --video shop.mp4 --model BUNDLE --ask-at 60:"Who came in?" --budget 6k
"""

app.add_typer(bench, name="bench")
state_app = typer.Typer(help="Look at what --state has kept.", no_args_is_help=True)
app.add_typer(state_app, name="state")


class Measure(str, Enum):
    """How policies are compared."""

    STREAMQA = "streamqa"
    AGREEMENT = "agreement"


class Scaling(str, Enum):
    """Of weights before they are rounded."""

    NONE = "none"
    AWQ = "awq"


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
        str | None,
        typer.Option(
            metavar="SRC",
            help="demo, an index like 0, /dev/videoN, csi://0, a URL, a GStreamer pipeline, or - for stdin.",
            show_default="demo",
        ),
    ] = None,
    video: Annotated[str | None, typer.Option(metavar="FILE", help="A video file, or a folder of pictures.")] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="demo|BUNDLE|CHECKPOINT",
            help="The embedded demo model, an exported bundle, or a checkpoint, of which a bundle is made once and kept.",
        ),
    ] = "demo",
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME[:K=V,...]|auto",
            help="How the memory is kept small: auto as `edgevlm calibrate` found best; `edgevlm policies` lists the ways.",
        ),
    ] = AUTO,
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
            help="Play a file or the demo at its own speed.",
            show_default="the demo on a terminal",
        ),
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Stop after this many frames.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop at this time of the stream.", min=0)] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A question for the end of the stream.", allow_from_autoenv=False),
    ] = None,
    ask_at: Annotated[
        list[str] | None,
        typer.Option(metavar="S:TEXT", help="A question asked at S seconds of the stream.", allow_from_autoenv=False),
    ] = None,
    size: options.Size = None,
    pixel_format: options.PixelFormat = None,
    camera_fps: options.CameraFps = None,
    decode: options.DecodeBy = options.Decoder.AUTO,
    gate: options.GateText = "off",
    wait: options.Wait = False,
    rule: options.OnBusy = None,
    open_timeout: options.OpenTimeout = 10.0,
    read_timeout: options.ReadTimeout = 10.0,
    stall_timeout: options.StallTimeout = 3.0,
    state: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Keep snapshots there, and go on from the newest.", show_default="nothing is kept"),
    ] = None,
    state_every: Annotated[float, typer.Option(metavar="S", help="Seconds from one snapshot to the next.")] = 30.0,
    seed: Annotated[int, typer.Option(help="The demo world's seed.", min=0)] = 0,
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
    questions: Annotated[bool, typer.Option("--questions", help="List what the demo model can be asked, and exit.")] = False,
) -> None:
    """Watch a stream and answer questions about it, on a terminal while it plays.

    The demo without a terminal ends after 128 frames. Ctrl-C, SIGTERM and SIGHUP end any run with its summary, and with a last
    snapshot under --state.
    """
    from edgevlm.apps.start import RunRequest, list_questions, start

    if questions:
        typer.echo("\n".join(list_questions()))
        return
    source = SourceOptions(
        size=options.parse_size(size), pixel_format=pixel_format, decode=decode.value, camera_fps=camera_fps, fps=fps,
        rule=rule.value if rule else None, wait=wait, seed=seed,
        open_timeout_s=open_timeout, read_timeout_s=read_timeout, stall_timeout_s=stall_timeout,
    )  # fmt: skip
    start(
        RunRequest(
            camera=camera, video=video, source=source, model=model, policy=policy, budget=budget, chunk=chunk,
            gate=gate, realtime=realtime, reindexing=reindexing.value, frames=frames, seconds=seconds,
            ask=ask or _lines("EDGEVLM_RUN_ASK"), ask_at=ask_at or _lines("EDGEVLM_RUN_ASK_AT"), threads=threads, as_json=json,
            state=state, state_every=state_every,
        )
    )  # fmt: skip


def _lines(variable: str) -> list[str]:
    """One value a line: click would split at every blank."""
    return os.environ.get(variable, "").splitlines()


def _pixels(size: str) -> tuple[int, int]:
    """(height, width) of ``WxH``; raises UserError."""
    width, _, height = size.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise UserError(f"--frame-size {size!r} is not WIDTHxHEIGHT in pixels, such as 640x480")
    return int(height), int(width)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face checkpoint directory, as save_pretrained writes it.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The bundle to write.", show_default="a folder of the cache, made once"),
    ] = None,
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
    frame_size: Annotated[
        str,
        typer.Option(
            metavar="WxH", help="The camera's frames, for families that keep their aspect (Qwen): other frames are stretched."
        ),
    ] = "640x480",
    text_gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the text half's weights from a GGUF file: llama, qwen2 or qwen3."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|fp16|int8|int4|int4-zp",
            help="Of the decoder's weights; int4-zp: with zero points.",
            show_default="fp32; AWQ and GPTQ checkpoints as they are",
        ),
    ] = None,
    scaling: Annotated[
        Scaling, typer.Option(help="awq: whole numbers are rounded more finely where the model's activations are large.")
    ] = Scaling.NONE,
    vision_precision: Annotated[str, typer.Option(metavar="fp32|int8", help="Of the vision tower's linears.")] = "fp32",
    kv: Annotated[KV, typer.Option(help="What the cache keeps keys and values as.")] = KV.fp32,
) -> None:
    """Turn a checkpoint into a bundle that edgevlm runs: ONNX graphs, weights, tokenizer, manifest; prints where it is.

    When it is stopped or killed, the same command goes on. Without --out the bundle is kept in the cache, where run --model
    CHECKPOINT finds it too.
    """
    from rich.console import Console

    from edgevlm.apps.bundles import kept_bundle
    from edgevlm.bench import writing
    from edgevlm.export import export_checkpoint

    options: dict[str, Any] = {
        "st_spattn_from": st_spattn, "camera": _pixels(frame_size), "text_gguf": text_gguf, "precision": precision,
        "vision_precision": vision_precision, "kv": kv.value,
    }  # fmt: skip
    command = export_checkpoint if scaling is Scaling.NONE else writing("edgevlm.apps.scaling").export_scaled
    with Console(stderr=True).status("reading the checkpoint") as status:
        if out is None:
            scaled = scaling is not Scaling.NONE
            path = kept_bundle(checkpoint, status.update, _note, force=force, scaled=scaled, **options)
        else:
            path = command(checkpoint, out, progress=status.update, notice=_note, force=force, **options)
    typer.echo(str(path))


def _note(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
def bundles(
    remove: Annotated[
        str | None, typer.Option(metavar="NAME|all", help="Remove a bundle, or all and what was left unfinished.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """List the bundles that are kept of checkpoints, with their sizes. EDGEVLM_CACHE names another folder for them."""
    from edgevlm.apps.bundles import list_bundles, remove_bundles

    if remove is not None:
        for path in remove_bundles(remove):
            _note(f"removed {path}")
        return
    for line in list_bundles(json):
        typer.echo(line)


@app.command()
def calibrate(
    bundle: Annotated[str, typer.Argument(metavar="demo|BUNDLE", help="The model to measure.")],
    video: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A clip to measure on; once or more.", show_default="the demo world, for demo"),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            help="Frames of each clip, and of streamqa's streams.",
            show_default="all that the model holds, 6,000 tokens at most; 64",
            min=1,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a calibrated copy and leave the bundle as it is.")
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="all|none|NAME[:K=V,...],...", help="The policies that --policy auto is chosen among.")
    ] = "all",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|6k|P%,...",
            help="Budgets to compare policies at: vision tokens per layer, or shares of a clip.",
            show_default="the one of a run, and 12.5%",
        ),
    ] = None,
    measure: Annotated[
        Measure | None,
        typer.Option(
            help="How policies are compared: by the demo world's questions, or by agreement with full KV's next tokens.",
            show_default="streamqa for demo, else agreement",
        ),
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A question for agreement to be measured on; once or more.",
            show_default="three plain ones",
            allow_from_autoenv=False,
        ),
    ] = None,
    streams: Annotated[int, typer.Option(help="Streams of streamqa.", min=2)] = 24,
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="Measure the layers, or compare the policies on what the bundle has.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|png", help="Draw the attention of each layer over age.")
    ] = None,
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """Measure what the policies need to know of a model, and which of them does best on it; write it into its bundle.

    The thresholds of infinipot-v's windows, the layer classes of hermes, the agreement of layers that purekv stands on.

    Then the policies themselves, at equal bytes, for --policy auto. When it is stopped, the same command goes on.
    """
    from rich.console import Console

    from edgevlm.apps import calibrate as command
    from edgevlm.apps.candidates import Comparison

    asked = tuple(ask or _lines("EDGEVLM_CALIBRATE_ASK"))
    comparison = Comparison(policies, budget, measure and measure.value, asked, streams)
    request = command.CalibrateRequest(bundle, video or [], frames, out, plot, threads, comparison, layers)
    with Console(stderr=True).status("starting") as status:
        result = command.start(request, status.update, lambda text: typer.echo(text, err=True))
    typer.echo((command.as_json if json else command.describe)(*result))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="demo|BUNDLE|CHECKPOINT", help="A checkpoint needs its config.json alone.")
    ] = "demo",
    device: Annotated[str, typer.Option(metavar="NAME", help="orin-nano-8, orin-agx-64, cpu, cuda and others.")] = "cpu",
    budget: Annotated[
        str | None, typer.Option(metavar="N|6k", help="Vision tokens held per layer.", show_default="as run")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of the weights.", show_default="the bundle's; of a checkpoint int4 on a Jetson, else fp32"
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|fp16|int8", help="Of keys and values.", show_default="fp16 on a GPU; on a CPU the bundle's, else fp32"
        ),
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames a second to keep up with.")] = 2.0,
    chunk: Annotated[int, typer.Option(help="Frames encoded and added to the memory at once.", min=1)] = 8,
    frame_size: Annotated[str, typer.Option(metavar="WxH", help="The camera's frames, as for export.")] = "640x480",
    measure: Annotated[bool, typer.Option("--measure", help="Run it on this CPU and compare the memory it takes.")] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Print published figures beside the plan's, and exit.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """Say what a model takes of a device's memory, whether it fits, and how fast it would be, without building anything."""
    from edgevlm.apps import plan as command
    from edgevlm.apps.start import parse_count

    if published:
        lines = command.show_published(json)
    else:
        wanted = None if budget is None else parse_count(budget)
        request = command.PlanRequest(model, device, wanted, precision, kv, fps, chunk, _pixels(frame_size))
        lines = command.show(request, json, measure)
    for line in lines:
        typer.echo(line)


@state_app.callback()
def _state() -> None:
    pass


@state_app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of run --state.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """Say what the snapshots in a folder hold, newest first; each is verified. Exit code 1 where none can be used."""
    from edgevlm.apps.state import show_state

    lines, usable = show_state(folder, json)
    typer.echo(lines)
    if not usable:
        raise typer.Exit(1)


@app.command()
def policies(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """List the policies of --policy: paper, settings with their defaults, and what is not as the paper has it; and auto."""
    from edgevlm.apps.policies import list_policies

    typer.echo(list_policies(json))


@app.command()
def cameras(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """List the cameras of this machine: each is asked for its modes and for one picture, and what fails says why."""
    from edgevlm.apps.cameras import list_cameras

    for line in list_cameras(json):
        typer.echo(line)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")] = False,
) -> None:
    """Say what would stop a first run on this machine, and how to mend it. Exit code 1 where something would."""
    from edgevlm.apps.doctor import report

    lines, healthy = report(json)
    for line in lines:
        typer.echo(line)
    if not healthy:
        raise typer.Exit(1)


def main() -> None:
    """Entry point: what the user did wrong is one line and exit code 2."""
    mask_title()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored, and stays so
            signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show ends no run
    try:
        code = app(prog_name="edgevlm", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _fail(mask_credentials(str(error)))
    except ClickException as error:
        _fail(mask_credentials(_usage(error)))
    except BrokenPipeError:
        _silence_stdout()
        sys.exit(0)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # typer's own answer to a closed pipe is exit code 1
            raise
        _silence_stdout()
        sys.exit(0)
    except OSError as error:
        _silence_stdout()
        _fail(f"{mask_credentials(str(error.filename or 'the output'))}: cannot be read or written ({error.strerror or error})")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str) -> NoReturn:
    if line:
        typer.echo(f"edgevlm: {line}", err=True)
    sys.exit(2)


def _usage(error: Exception) -> str:
    """A usage error's own words in one line, and where to read on; nothing where they are the help, shown already."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    context, words = getattr(error, "ctx", None), " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    return f"{words.rstrip('.')}; see {context.command_path if context else 'edgevlm'} --help"


def _silence_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's own flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

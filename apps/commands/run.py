"""``edgevlm run``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from edgevlm.apps.commands import cli_options as options
from edgevlm.apps.commands.cli_options import Json, Threads, lines
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.runtime.auto import AUTO
from edgevlm.runtime.engine import DEFAULT_ENGINE

EPILOG = """
[bold]Examples[/bold]

  edgevlm run                                             the demo camera, with questions and the truth

  edgevlm run --frames 64 --ask "how many objects are there now?" --json

  edgevlm run --camera 0 --size 1280x720 --model BUNDLE   ask at the prompt while it watches

  edgevlm run --video shop.mp4 --model BUNDLE --ask-at 60:"Who came in?" --budget 6k
"""


class Reindexing(str, Enum):
    """When kept positions are made dense."""

    LAZY = "lazy"
    EAGER = "eager"


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
    store_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="8G",
            help="Most that a policy that retrieves keeps in its file: in --state, else a temporary one; 0 for no file.",
            show_default="8G",
        ),
    ] = None,
    host_bytes: Annotated[
        str | None,
        typer.Option(metavar="256M", help="Most that it keeps of that in host memory.", show_default="256M"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The demo world's seed.", min=0)] = 0,
    threads: Threads = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Backend that runs the model.")] = DEFAULT_ENGINE,
    json: Json = False,
    questions: Annotated[bool, typer.Option("--questions", help="List what the demo model can be asked, and exit.")] = False,
) -> None:
    """Watch a stream and answer questions about it, on a terminal while it plays.

    The demo without a terminal ends after 128 frames. Ctrl-C, SIGTERM and SIGHUP end any run with its summary, and with a last
    snapshot under --state.
    """
    from edgevlm.apps.run.launch import RunRequest, launch, list_questions

    if questions:
        typer.echo("\n".join(list_questions()))
        return
    source = SourceOptions(
        size=options.parse_size(size), pixel_format=pixel_format, decode=decode.value, camera_fps=camera_fps, fps=fps,
        rule=rule.value if rule else None, wait=wait, seed=seed,
        open_timeout_s=open_timeout, read_timeout_s=read_timeout, stall_timeout_s=stall_timeout,
    )  # fmt: skip
    launch(
        RunRequest(
            camera=camera, video=video, source=source, model=model, policy=policy, budget=budget, chunk=chunk,
            gate=gate, realtime=realtime, reindexing=reindexing.value, frames=frames, seconds=seconds,
            ask=ask or lines("EDGEVLM_RUN_ASK"), ask_at=ask_at or lines("EDGEVLM_RUN_ASK_AT"), threads=threads, as_json=json,
            state=state, state_every=state_every, store_bytes=store_bytes, host_bytes=host_bytes, engine=engine,
        )
    )  # fmt: skip

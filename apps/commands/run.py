"""``edgevlm run``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from edgevlm.apps.commands.cli_options import Json, check_kv, lines, parse_size

STREAM, CAMERA, MEMORY, MACHINE = "Stream", "Cameras and files", "Memory and state", "Machine and output"
EXPORT = "Export of a checkpoint"
EPILOG = """
\b
Examples:
  edgevlm run                                     watch the demo and ask
  edgevlm run --camera 0 --model ORG/NAME         watch a webcam
  edgevlm run --camera rtsp://HOST/PATH --model BUNDLE --state DIR
  edgevlm run --video shop.mp4 --model BUNDLE --ask "Who came in?" --json

Each option has a variable: EDGEVLM_RUN_MODEL is --model, and so on. EDGEVLM_RUN_ASK and EDGEVLM_RUN_ASK_AT take one question
a line. Ctrl-C, SIGTERM and SIGHUP end a run with its summary and a last snapshot.
"""


def run(
    camera: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Watch demo, 0, /dev/video0, csi://0, URL, pipeline or -.", show_default="demo"),
    ] = None,
    video: Annotated[str | None, typer.Option(metavar="FILE", help="Watch a video file, or a folder of pictures.")] = None,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Use demo, a bundle, a checkpoint, or ORG/NAME.")] = "demo",
    ask: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Ask this at the end of the stream.", allow_from_autoenv=False),
    ] = None,
    ask_at: Annotated[
        list[str] | None, typer.Option(metavar="S:TEXT", help="Ask this at S seconds.", allow_from_autoenv=False)
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME[:K=V,..]", help="Forget by one of `edgevlm policies`.")] = "auto",
    budget: Annotated[
        str | None,
        typer.Option(metavar="N|6k", help="Keep this many vision tokens per layer.", show_default="half the model's, <= 6k"),
    ] = None,
    fps: Annotated[float, typer.Option(metavar="N", help="Watch this many frames a second.")] = 2.0,
    state: Annotated[str | None, typer.Option(metavar="DIR", help="Keep snapshots there, and resume from the newest.")] = None,
    json: Json = False,
    questions: Annotated[
        bool, typer.Option("--questions", help="List what the demo model can be asked.", rich_help_panel=STREAM)
    ] = False,
    frames: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after this many frames.", min=1, rich_help_panel=STREAM)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Stop at this time of the stream.", min=0, rich_help_panel=STREAM)
    ] = None,
    realtime: Annotated[
        bool | None,
        typer.Option(
            "--realtime/--no-realtime",
            help="Play recordings at their own speed.",
            show_default=False,
            rich_help_panel=STREAM,
        ),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            metavar="MODE[:K=V,..]",
            help="Ignore still frames: off, skip or thin.",
            rich_help_panel=STREAM,
        ),
    ] = "off",
    chunk: Annotated[
        int, typer.Option(metavar="N", help="Encode this many frames at once.", min=1, rich_help_panel=STREAM)
    ] = 8,
    frame_size: Annotated[
        str,
        typer.Option(metavar="auto|WxH", help="Expect frames of this size.", rich_help_panel=STREAM),
    ] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed the demo world.", min=0, rich_help_panel=STREAM)] = 0,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a camera that is not there yet.", rich_help_panel=CAMERA)
    ] = False,
    rule: Annotated[
        Literal["block", "drop-oldest"] | None,
        typer.Option(
            metavar="block|drop-oldest",
            help="Queue or drop frames while busy.",
            show_default="cameras: drop",
            rich_help_panel=CAMERA,
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="Ask a camera for this size.", rich_help_panel=CAMERA)] = None,
    pixel_format: Annotated[
        str | None, typer.Option(metavar="FOURCC", help="Ask a USB camera for MJPG, YUYV, ..", rich_help_panel=CAMERA)
    ] = None,
    camera_fps: Annotated[
        float | None,
        typer.Option(metavar="N", help="Ask a camera for this rate.", rich_help_panel=CAMERA),
    ] = None,
    decode: Annotated[
        Literal["auto", "cpu"],
        typer.Option(metavar="auto|cpu", help="Decode on the GPU if possible.", rich_help_panel=CAMERA),
    ] = "auto",
    open_timeout: Annotated[
        float, typer.Option(metavar="S", help="Give up connecting after this long.", rich_help_panel=CAMERA)
    ] = 10.0,
    read_timeout: Annotated[
        float, typer.Option(metavar="S", help="Reconnect after this long without a frame.", rich_help_panel=CAMERA)
    ] = 10.0,
    stall_timeout: Annotated[
        float, typer.Option(metavar="S", help="Report a stall after this long.", rich_help_panel=CAMERA)
    ] = 3.0,
    append: Annotated[
        str,
        typer.Option(
            metavar="all|changed[:..]",
            help="Append all of each frame, or what changed.",
            rich_help_panel=MEMORY,
        ),
    ] = "auto",
    encode: Annotated[
        str,
        typer.Option(
            metavar="all|changed[:..]",
            help="Encode all of each frame, or what changed.",
            rich_help_panel=MEMORY,
        ),
    ] = "auto",
    reindexing: Annotated[
        Literal["lazy", "eager"],
        typer.Option(metavar="lazy|eager", help="Renumber positions late, or always.", rich_help_panel=MEMORY),
    ] = "lazy",
    positions: Annotated[
        Literal["trained", "transformers"] | None,
        typer.Option(
            metavar="NAME",
            help="Place Qwen's prompts as trained or transformers.",
            show_default=False,
            rich_help_panel=MEMORY,
        ),
    ] = None,
    store_bytes: Annotated[
        str | None,
        typer.Option(metavar="8G", help="Limit a retrieval policy's file.", show_default="8G", rich_help_panel=MEMORY),
    ] = None,
    host_bytes: Annotated[
        str | None, typer.Option(metavar="256M", help="Limit its host memory.", show_default="256M", rich_help_panel=MEMORY)
    ] = None,
    state_every: Annotated[float, typer.Option(metavar="S", help="Take a snapshot this often.", rich_help_panel=MEMORY)] = 30.0,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Export as fp32, int8, int4, ..",
            show_default="by plan",
            rich_help_panel=EXPORT,
        ),
    ] = None,
    vision_precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Export vision weights as this.", show_default="by plan", rich_help_panel=EXPORT),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Export a cache of fp32, fp16 or int8.", callback=check_kv, rich_help_panel=EXPORT),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Use this many CPU threads.", show_default="all cores", min=1, max=256, rich_help_panel=MACHINE
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Run the model on this backend.", rich_help_panel=MACHINE)
    ] = "onnxruntime-cpu",
    quiet: Annotated[bool, typer.Option("--quiet", help="Write answers and errors only.", rich_help_panel=MACHINE)] = False,
    stats_every: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Report statistics this often.", min=0.1, show_default="1 for --json", rich_help_panel=MACHINE
        ),
    ] = None,
) -> None:
    """Watch a stream and answer questions about it.

    On a terminal, ask while it plays. Elsewhere the demo ends after 384 frames.
    """
    from edgevlm.progress import progress

    with progress("starting"):
        from edgevlm.apps.launch import RunRequest, launch
        from edgevlm.apps.sources.base import SourceOptions

    if questions:
        from edgevlm.calib.demo.questions import all_questions

        typer.echo("\n".join(all_questions()))
        return
    frames_of = None if frame_size == "auto" else parse_size("--frame-size", frame_size)
    source = SourceOptions(
        size=parse_size("--size", size) if size else None, pixel_format=pixel_format, decode=decode, camera_fps=camera_fps,
        fps=fps, rule=rule, wait=wait, seed=seed,
        open_timeout_s=open_timeout, read_timeout_s=read_timeout, stall_timeout_s=stall_timeout,
    )  # fmt: skip
    launch(
        RunRequest(
            camera=camera, video=video, source=source, model=model, policy=policy, budget=budget, chunk=chunk,
            gate=gate, realtime=realtime, reindexing=reindexing, append=append, encode=encode,
            frames=frames, seconds=seconds,
            ask=ask or lines("EDGEVLM_RUN_ASK"), ask_at=ask_at or lines("EDGEVLM_RUN_ASK_AT"), threads=threads, as_json=json,
            state=state, state_every=state_every, store_bytes=store_bytes, host_bytes=host_bytes, engine=engine,
            positions=positions, quiet=quiet, stats_every=stats_every,
            precision=precision, vision_precision=vision_precision, kv=kv,
            frame_size=None if frames_of is None else (frames_of[1], frames_of[0]),
        )
    )  # fmt: skip

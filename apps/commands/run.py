"""``edgevlm run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgevlm.apps.commands.cli_options import Json, check_kv, flag, lines, option, parse_size

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
    camera: Annotated[str | None, option("SRC", "Watch demo, 0, /dev/video0, csi://0, URL, pipeline or -.", "demo")] = None,
    video: Annotated[str | None, option("FILE", "Watch a video file, or a folder of pictures.")] = None,
    model: Annotated[str, option("MODEL", "Use demo, a bundle, a checkpoint, or ORG/NAME.")] = "demo",
    ask: Annotated[list[str] | None, option("TEXT", "Ask this at the end of the stream.", allow_from_autoenv=False)] = None,
    ask_at: Annotated[list[str] | None, option("S:TEXT", "Ask this at S seconds.", allow_from_autoenv=False)] = None,
    policy: Annotated[str, option("NAME[:K=V,..]", "Forget by one of `edgevlm policies`.")] = "auto",
    budget: Annotated[
        str | None, option("N|6k", "Keep this many vision tokens per layer.", "half its positions, <= 6k")
    ] = None,
    fps: Annotated[float, option("N", "Watch this many frames a second.")] = 2.0,
    state: Annotated[str | None, option("DIR|URL", "Keep snapshots there, and resume from the newest.")] = None,
    json: Json = False,
    questions: Annotated[bool, flag("--questions", "List what the demo model can be asked.", panel=STREAM)] = False,
    frames: Annotated[int | None, option("N", "Stop after this many frames.", panel=STREAM, min=1)] = None,
    seconds: Annotated[float | None, option("S", "Stop at this time of the stream.", panel=STREAM, min=0)] = None,
    realtime: Annotated[
        bool | None, flag("--realtime/--no-realtime", "Play recordings at their own speed.", panel=STREAM, show_default=False)
    ] = None,
    gate: Annotated[str, option("MODE[:K=V,..]", "Skip still frames: off, skip or thin.", panel=STREAM)] = "off",
    chunk: Annotated[int, option("N", "Encode this many frames at once.", panel=STREAM, min=1)] = 8,
    frame_size: Annotated[str, option("auto|WxH", "Expect frames of this size.", panel=STREAM)] = "auto",
    seed: Annotated[int, option("N", "Seed the demo world.", panel=STREAM, min=0)] = 0,
    wait: Annotated[bool, flag("--wait", "Wait for a camera that is not there yet.", panel=CAMERA)] = False,
    rule: Annotated[
        Literal["block", "drop-oldest"] | None,
        option("block|drop-oldest", "Wait while busy, or drop frames.", "cameras: drop-oldest", panel=CAMERA),
    ] = None,
    size: Annotated[str | None, option("WxH", "Ask a camera for this size.", panel=CAMERA)] = None,
    pixel_format: Annotated[str | None, option("FOURCC", "Ask a USB camera for MJPG, YUYV, ..", panel=CAMERA)] = None,
    camera_fps: Annotated[float | None, option("N", "Ask a camera for this rate.", panel=CAMERA)] = None,
    decode: Annotated[Literal["auto", "cpu"], option("auto|cpu", "Decode on the GPU if possible.", panel=CAMERA)] = "auto",
    open_timeout: Annotated[float, option("S", "Give up connecting after this long.", panel=CAMERA)] = 10.0,
    read_timeout: Annotated[float, option("S", "Reconnect after this long without a frame.", panel=CAMERA)] = 10.0,
    stall_timeout: Annotated[float, option("S", "Report a stall after this long.", panel=CAMERA)] = 3.0,
    append: Annotated[str, option("auto|all|changed", "Append all of a frame, or what changed.", panel=MEMORY)] = "auto",
    encode: Annotated[str, option("auto|all|changed", "Encode all of a frame, or what changed.", panel=MEMORY)] = "auto",
    reindexing: Annotated[
        Literal["lazy", "eager"], option("lazy|eager", "Re-index positions late, or always.", panel=MEMORY)
    ] = "lazy",
    positions: Annotated[
        Literal["trained", "transformers"] | None,
        option("NAME", "Place Qwen's prompts as trained or transformers.", False, panel=MEMORY),
    ] = None,
    store_bytes: Annotated[str | None, option("8G", "Limit a retrieval policy's file.", "8G", panel=MEMORY)] = None,
    host_bytes: Annotated[str | None, option("256M", "Limit its host memory.", "256M", panel=MEMORY)] = None,
    state_every: Annotated[float, option("S", "Take a snapshot this often.", panel=MEMORY)] = 30.0,
    state_key_file: Annotated[Path | None, option("FILE", "Encrypt snapshots with this key.", panel=MEMORY)] = None,
    precision: Annotated[str | None, option("NAME", "Export as fp32, int8, int4, ..", "by plan", panel=EXPORT)] = None,
    vision_precision: Annotated[str | None, option("NAME", "Export vision weights as this.", "by plan", panel=EXPORT)] = None,
    kv: Annotated[str | None, option("NAME", "Export a cache of fp32, fp16 or int8.", panel=EXPORT, callback=check_kv)] = None,
    threads: Annotated[
        int | None, option("N", "Use this many CPU threads.", "physical cores", panel=MACHINE, min=1, max=256)
    ] = None,
    engine: Annotated[str, option("NAME", "Run the model with this engine.", panel=MACHINE)] = "onnxruntime-cpu",
    quiet: Annotated[bool, flag("--quiet", "Write answers and errors only.", panel=MACHINE)] = False,
    stats_every: Annotated[
        float | None, option("S", "Report statistics this often.", "1 for --json", panel=MACHINE, min=0.1)
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
            state=state, state_every=state_every, state_key=None if state_key_file is None else f"file:{state_key_file}",
            store_bytes=store_bytes, host_bytes=host_bytes, engine=engine,
            positions=positions, quiet=quiet, stats_every=stats_every,
            precision=precision, vision_precision=vision_precision, kv=kv,
            frame_size=None if frames_of is None else (frames_of[1], frames_of[0]),
        )
    )  # fmt: skip

"""``edgevlm run``."""

from __future__ import annotations

from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, flag, with_settings
from edgevlm.apps.settings import RunSettings
from edgevlm.progress import progress

STREAM, MACHINE = "Stream", "Memory and machine"
PANELS = {
    None: ("camera", "video", "model", "ask", "ask_at", "policy", "budget", "fps", "state"),
    STREAM: (
        "frames", "seconds", "realtime", "chunk", "frame_size", "seed", "wait", "rule", "size", "pixel_format",
        "camera_fps", "open_timeout", "read_timeout", "stall_timeout",
    ),
    MACHINE: (
        "append", "encode", "reindexing", "store_bytes", "host_bytes", "state_every", "state_key_file",
        "precision", "vision_precision", "kv", "threads", "engine", "stats_every",
    ),
}  # fmt: skip
RARE = (
    "chunk", "frame_size", "size", "pixel_format", "camera_fps", "open_timeout", "read_timeout", "stall_timeout",
    "reindexing", "store_bytes", "host_bytes", "vision_precision", "kv", "engine", "stats_every",
)  # fmt: skip
EPILOG = """
\b
Examples:
  edgevlm run                                     watch the demo and ask
  edgevlm run --camera 0 --model ORG/NAME         watch a webcam
  edgevlm run --camera rtsp://HOST/PATH --model BUNDLE --state DIR
  edgevlm run --video shop.mp4 --model BUNDLE --ask "Who came in?" --json

Each option has a variable: EDGEVLM_RUN_MODEL is --model. EDGEVLM_RUN_ASK and EDGEVLM_RUN_ASK_AT take one question a line.
Ctrl-C and SIGTERM end a run with its summary and a last snapshot.
"""


@with_settings(RunSettings, PANELS, RARE)
def run(
    settings: RunSettings,
    json: Json = False,
    questions: Annotated[bool, flag("--questions", "List what the demo model can be asked.", panel=STREAM)] = False,
    quiet: Annotated[bool, flag("--quiet", "Write answers and errors only.", panel=MACHINE)] = False,
) -> None:
    """Watch a stream and answer questions about it.

    On a terminal, ask while it plays. Elsewhere the demo ends after 384 frames.
    """
    with progress("starting"):
        from edgevlm.apps.launch import launch

    if questions:
        from edgevlm.calib.demo.questions import all_questions

        typer.echo("\n".join(all_questions()))
        return
    launch(settings, as_json=json, quiet=quiet)

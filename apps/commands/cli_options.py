"""Options that several commands have, and what they do with what was typed."""

from __future__ import annotations

import os
import re
from enum import Enum
from typing import Annotated

import typer

from edgevlm.errors import UserError

Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores", min=1, max=256)]
Budget = Annotated[
    str | None, typer.Option(metavar="N|6k", help="Vision tokens per layer.", show_default="6144; others: as run")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]


class KV(str, Enum):
    """Of keys and values, as :data:`edgevlm.runtime.kv.KV_TYPES` names them."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


def lines(variable: str) -> list[str]:
    """One value a line: click would split at every blank."""
    return os.environ.get(variable, "").splitlines()


def pixels(size: str) -> tuple[int, int]:
    """(height, width) of ``WxH``; raises UserError."""
    width, _, height = size.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise UserError(f"--frame-size {size!r} is not WIDTHxHEIGHT in pixels, such as 640x480")
    return int(height), int(width)


def note(line: str) -> None:
    typer.echo(line, err=True)


PANEL = "Cameras"


class Busy(str, Enum):
    """What happens to frames while the last one is being watched."""

    BLOCK = "block"
    DROP_OLDEST = "drop-oldest"


Wait = Annotated[
    bool, typer.Option("--wait", help="Wait for a camera that is not there when the run starts.", rich_help_panel=PANEL)
]
OnBusy = Annotated[
    Busy | None,
    typer.Option(
        "--rule",
        help="Frames that come while the last one is being watched: let them wait, or keep the newest alone.",
        show_default="drop-oldest for cameras and --realtime",
        rich_help_panel=PANEL,
    ),
]
OpenTimeout = Annotated[
    float, typer.Option(metavar="S", help="Give up a connection that takes longer to open.", rich_help_panel=PANEL)
]
ReadTimeout = Annotated[
    float, typer.Option(metavar="S", help="Without a frame this long, connect anew.", rich_help_panel=PANEL)
]
StallTimeout = Annotated[
    float, typer.Option(metavar="S", help="Without a frame this long, say that the camera stalls.", rich_help_panel=PANEL)
]
Size = Annotated[
    str | None,
    typer.Option(metavar="WxH", help="Size asked of a USB or CSI camera; it takes what is nearest.", rich_help_panel=PANEL),
]
PixelFormat = Annotated[
    str | None,
    typer.Option(metavar="FOURCC", help="Pixel format asked of a USB camera, like MJPG or YUYV.", rich_help_panel=PANEL),
]
CameraFps = Annotated[
    float | None,
    typer.Option(
        "--camera-fps",
        metavar="N",
        help="Rate asked of a USB or CSI camera, and that of Motion JPEG on stdin or of a folder of pictures.",
        show_default="the camera's own; 25 on stdin; --fps for a folder",
        rich_help_panel=PANEL,
    ),
]


class Decoder(str, Enum):
    """Who decodes a video file."""

    AUTO = "auto"
    CPU = "cpu"


DecodeBy = Annotated[
    Decoder,
    typer.Option("--decode", help="A video file by the graphics card where one can, or by the CPU.", rich_help_panel=PANEL),
]
GateText = Annotated[
    str,
    typer.Option(
        "--gate",
        metavar="off|skip|thin[:K=V,...]",
        help="Near-static frames are not watched (skip), or every 8th of them alone (thin). Settings: threshold=4 "
        "(levels of 255), every=8.",
        rich_help_panel=PANEL,
    ),
]


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``1280x720``. Raises UserError for what is none."""
    if text is None:
        return None
    if not (match := re.fullmatch(r"(\d{1,5})[xX](\d{1,5})", text.strip())) or "0" in match.groups():
        raise UserError(f"--size {text}: give width and height in pixels, like 1280x720")
    return int(match[1]), int(match[2])

"""Options of ``edgevlm run`` that say how a source is opened and read."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

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

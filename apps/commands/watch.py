"""``edgevlm watch``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.packages import needed

RULE, SEND = "When it opens and closes", "Where events go"
DEMO_SEED = 10  # of a world that shows a red square within seconds
EPILOG = """
\b
Examples:
  edgevlm watch "is there a red square?"
  edgevlm watch "is somebody at the door?" --camera rtsp://HOST/PATH
                --model ORG/NAME --open-after 2 --mqtt mqtt://HOST --state DIR

It opens when the answer becomes yes, and closes when it no longer is. Several watches and cameras: edgevlm serve.
"""


def watch(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="Ask this again and again.")],
    camera: Annotated[str, typer.Option(metavar="SRC", help="Watch demo, 0, /dev/video0, URL or a file.")] = "demo",
    model: Annotated[str, typer.Option(metavar="MODEL", help="Use demo, a bundle, or ORG/NAME.")] = "demo",
    policy: Annotated[str, typer.Option(metavar="NAME[:K=V,..]", help="Forget by this policy.")] = "auto",
    budget: Annotated[str | None, typer.Option(metavar="N|6k", help="Keep this many vision tokens per layer.")] = None,
    fps: Annotated[float, typer.Option(metavar="N", help="Watch this many frames a second.")] = 2.0,
    state: Annotated[str | None, typer.Option(metavar="DIR", help="Keep memory and events there, and resume.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed the demo world.", min=0)] = DEMO_SEED,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Use this many CPU threads.", min=1, max=256)] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write events and errors only.")] = False,
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Offer this answer.", show_default="yes, no", rich_help_panel=RULE),
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Open at this answer.", show_default="the first", rich_help_panel=RULE),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(metavar="S", help="Ask every S seconds.", show_default="each frame", rich_help_panel=RULE),
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Ask only when the picture changed.", rich_help_panel=RULE)
    ] = False,
    open_above: Annotated[
        float | None,
        typer.Option(metavar="P", help="Open above this probability.", show_default="0.6", rich_help_panel=RULE),
    ] = None,
    close_below: Annotated[
        float | None,
        typer.Option(metavar="P", help="Close below this probability.", show_default="0.4", rich_help_panel=RULE),
    ] = None,
    open_after: Annotated[
        float | None, typer.Option(metavar="S", help="Open after so long.", show_default="0.1", rich_help_panel=RULE)
    ] = None,
    close_after: Annotated[
        float | None, typer.Option(metavar="S", help="Close after so long.", show_default="0.1", rich_help_panel=RULE)
    ] = None,
    cooldown: Annotated[
        float | None,
        typer.Option(metavar="S", help="Stay closed for so long.", show_default="0", rich_help_panel=RULE),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(metavar="'mon-fri 08:00-18:00'", help="Ask at these times.", rich_help_panel=RULE),
    ] = None,
    on: Annotated[
        Literal["open", "close", "both"],
        typer.Option(metavar="open|close|both", help="Send these events.", rich_help_panel=SEND),
    ] = "both",
    webhook: Annotated[list[str] | None, typer.Option(metavar="URL", help="Post events there.", rich_help_panel=SEND)] = None,
    mqtt: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Publish to mqtt://HOST, for Home Assistant.", rich_help_panel=SEND)
    ] = None,
    apprise: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Notify by a service that apprise knows.", rich_help_panel=SEND)
    ] = None,
    exec: Annotated[
        list[str] | None, typer.Option(metavar="CMD", help="Run this, with the event on stdin.", rich_help_panel=SEND)
    ] = None,
) -> None:
    """Tell when the answer to a question becomes yes.

    Each event is a line on stdout when the watch opens or closes.
    """
    from edgevlm.progress import progress

    with progress("starting"):
        watching = needed("edgevlm.apps.serve.watch", "edgevlm watch", "serve")
        config = needed("edgevlm.apps.serve.config", "edgevlm watch", "serve")
        from edgevlm.apps.sources import SourceOptions
    asked = watching.checked_watch({
        "question": question, "choices": choice or None, "answer": answer or None, "every": every, "changed": changed,
        "open_above": open_above, "close_below": close_below, "open_after": open_after, "close_after": close_after,
        "cooldown": cooldown, "schedule": schedule or None, "on": on,
    })  # fmt: skip
    addresses = {"webhook": webhook, "mqtt": mqtt, "apprise": apprise}
    sinks = [{"kind": kind, "url": url} for kind, urls in addresses.items() for url in urls or []]
    sinks += [{"kind": "exec", "command": command} for command in exec or []]
    shared = {"model": model, "policy": policy, "budget": budget, "fps": fps, "state": state, "threads": threads}
    settings: dict[str, Any] = {name: value for name, value in shared.items() if value is not None}
    settings |= {"cameras": {"demo" if camera == "demo" else "camera": {"source": camera}}, "watches": [asked], "sinks": sinks}
    watching.watch(config.check_config(settings, "watch"), SourceOptions(seed=seed), json, quiet)

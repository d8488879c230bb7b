"""``edgevlm watch``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from edgevlm.apps.commands.cli_options import EncryptWith, Json, Snapshots, flag, given, of_file, option, with_settings
from edgevlm.apps.settings import RunSettings
from edgevlm.packages import needed
from edgevlm.progress import progress

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


@with_settings(RunSettings, {None: ("model", "policy", "budget", "fps", "threads")}, typed_only=True)
def watch(
    settings: dict[str, Any],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="Ask this again and again.")],
    camera: Annotated[str, option("SRC", "Watch demo, 0, /dev/video0, URL or a file.")] = "demo",
    state: Annotated[str | None, option("DIR", "Keep memory and events there, and resume.")] = None,
    state_key_file: EncryptWith = None,
    snapshots: Snapshots = None,
    seed: Annotated[int, option("N", "Seed the demo world.", min=0)] = DEMO_SEED,
    json: Json = False,
    quiet: Annotated[bool, flag("--quiet", "Write events and errors only.")] = False,
    choice: Annotated[list[str] | None, option("TEXT", "Offer this answer.", "yes, no", panel=RULE)] = None,
    answer: Annotated[list[str] | None, option("TEXT", "Open at this answer.", "the first", panel=RULE)] = None,
    every: Annotated[float | None, option("S", "Ask every S seconds.", "each frame", panel=RULE)] = None,
    changed: Annotated[bool, flag("--changed", "Ask only when the picture changed.", panel=RULE)] = False,
    open_above: Annotated[float | None, option("P", "Open above this probability.", "0.6", panel=RULE)] = None,
    close_below: Annotated[float | None, option("P", "Close below this probability.", "0.4", panel=RULE)] = None,
    open_after: Annotated[float | None, option("S", "Open after this long.", "0.1", panel=RULE)] = None,
    close_after: Annotated[float | None, option("S", "Close after this long.", "0.1", panel=RULE)] = None,
    cooldown: Annotated[float | None, option("S", "Stay closed for this long.", "0", panel=RULE)] = None,
    schedule: Annotated[list[str] | None, option("'mon-fri 08:00-18:00'", "Ask at these times.", panel=RULE)] = None,
    on: Annotated[Literal["open", "close", "both"], option("open|close|both", "Send these events.", panel=SEND)] = "both",
    webhook: Annotated[list[str] | None, option("URL", "Post events there.", panel=SEND)] = None,
    mqtt: Annotated[list[str] | None, option("URL", "Publish to mqtt://HOST, for Home Assistant.", panel=SEND)] = None,
    apprise: Annotated[list[str] | None, option("URL", "Notify by a service that apprise knows.", panel=SEND)] = None,
    exec: Annotated[list[str] | None, option("CMD", "Run this, with the event on stdin.", panel=SEND)] = None,
) -> None:
    """Report when the answer to a question becomes yes.

    Each event is a line on stdout when the watch opens or closes.
    """
    with progress("starting"):
        watching = needed("edgevlm.apps.serve.watch", "edgevlm watch", "serve")
        config = needed("edgevlm.apps.serve.config", "edgevlm watch", "serve")
        from edgevlm.apps.sources import SourceOptions
    asked = watching.checked_watch({
        "question": question, "choices": choice or None, "answer": answer or None, "every": every, "changed": changed,
        "open_above": open_above, "close_below": close_below, "open_after": open_after, "close_after": close_after,
        "cooldown": cooldown, "schedule": schedule or None, "on": on,
    })  # fmt: skip
    addresses = given(webhook=webhook, mqtt=mqtt, apprise=apprise)
    sinks = [{"kind": kind, "url": url} for kind, urls in addresses.items() for url in urls]
    sinks += [{"kind": "exec", "command": command} for command in exec or []]
    settings |= given(state=state, snapshots=snapshots, state_key=of_file(state_key_file))
    settings |= {"cameras": {"demo" if camera == "demo" else "camera": {"source": camera}}, "watches": [asked], "sinks": sinks}
    watching.watch(config.check_config(settings, "watch"), SourceOptions(seed=seed), json, quiet)

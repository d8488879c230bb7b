"""Commands that watch cameras and query what they saw: ``run``, ``watch``, ``serve``, ``config``, ``ask`` and others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edgevlm.apps.commands.cli_options import (
    EncryptWith,
    Json,
    KeyFile,
    Snapshots,
    StateKeyFile,
    flag,
    given,
    lines,
    of_file,
    option,
    values_of,
    with_settings,
)  # fmt: skip
from edgevlm.apps.commands.lazy import plain_app
from edgevlm.apps.credentials import state_key
from edgevlm.apps.settings import RunSettings
from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.progress import progress, to_stderr, to_stdout

ASK = """
\b
Examples:
  edgevlm ask "how many objects are there now?"
  edgevlm ask "who came in?" --since 10m          about the last ten minutes
  edgevlm digest --since 8h                       what happened overnight
  edgevlm journal --search bicycle                what a camera wrote down
  edgevlm forget --since 13:30 --until 14:00      delete half an hour
"""
EPILOG = {
    "run": """
\b
Examples:
  edgevlm run                                     watch the demo and ask
  edgevlm run --camera 0 --model ORG/NAME         watch a webcam
  edgevlm run --camera rtsp://HOST/PATH --model BUNDLE --state DIR
  edgevlm run --video shop.mp4 --model BUNDLE --ask "Who came in?" --json

Each option has a variable: EDGEVLM_RUN_MODEL is --model. EDGEVLM_RUN_ASK and EDGEVLM_RUN_ASK_AT take one question a line.
Ctrl-C and SIGTERM end a run with its summary and a last snapshot.
""",
    "watch": """
\b
Examples:
  edgevlm watch "is there a red square?"
  edgevlm watch "is somebody at the door?" --camera rtsp://HOST/PATH
                --model ORG/NAME --open-after 2 --mqtt mqtt://HOST --state DIR

A watch opens when the answer becomes yes, and closes when it changes back. Several watches and cameras: edgevlm serve.
""",
    "serve": """
\b
Examples:
  edgevlm serve                                   serve the demo camera
  edgevlm serve --camera rtsp://HOST/PATH --model ORG/NAME
  edgevlm serve edgevlm.toml                      several cameras
  edgevlm serve --cluster head --key-file key     start a cluster
  edgevlm ask "how many objects are there now?"   ask from another shell
""",
    **dict.fromkeys(("ask", "digest", "journal", "forget"), ASK),
}

STREAM, MACHINE, RULE, SEND = "Stream", "Memory and machine", "When it opens and closes", "Where events go"
PANELS = {
    None: ("camera", "video", "model", "ask", "ask_at", "policy", "budget", "fps", "state"),
    STREAM: (
        "frames", "seconds", "realtime", "chunk", "frame_size", "seed", "wait", "rule", "size", "pixel_format",
        "camera_fps", "open_timeout", "read_timeout", "stall_timeout",
    ),
    MACHINE: (
        "append", "encode", "reindexing", "store_bytes", "host_bytes", "state_every", "state_key_file", "state_from",
        "precision", "vision_precision", "kv", "threads", "engine", "stats_every",
    ),
}  # fmt: skip
RARE = (
    "chunk", "frame_size", "size", "pixel_format", "camera_fps", "open_timeout", "read_timeout", "stall_timeout",
    "reindexing", "store_bytes", "host_bytes", "vision_precision", "kv", "engine", "stats_every",
)  # fmt: skip
Server = Annotated[str, option("URL", "Talk to the server at this address.")]
Stream = Annotated[str | None, option("NAME", "Use this camera only.", "all")]
Since = Annotated[str | None, option("10m|14:03", "Begin 10 minutes ago, or at 14:03.")]
Until = Annotated[str | None, option("5m|14:10", "End 5 minutes ago, or at 14:10.", "now")]
LOCAL = "http://127.0.0.1:8000"
DEMO_SEED = 10  # the demo world with this seed shows a red square within seconds


@with_settings(RunSettings, PANELS, RARE)
def run(
    settings: RunSettings,
    json: Json = False,
    questions: Annotated[bool, flag("--questions", "List the questions that the demo model knows.", panel=STREAM)] = False,
    quiet: Annotated[bool, flag("--quiet", "Write only answers, errors and data losses.", panel=MACHINE)] = False,
    verbose: Annotated[bool, flag("--verbose", "Show the measurements behind the policy.", panel=MACHINE)] = False,
) -> None:
    """Watch a stream and answer questions about it.

    On a terminal, questions can be typed while the stream plays. Without a terminal, the demo ends after 384 frames.
    """
    with progress("starting"):
        from edgevlm.apps.launch import launch

    if questions:
        from edgevlm.runtime.taught import all_questions

        to_stdout("\n".join(all_questions()))
        return
    launch(settings, as_json=json, quiet=quiet, verbose=verbose)


@with_settings(RunSettings, {None: ("model", "policy", "budget", "fps", "threads")}, typed_only=True)
def watch(
    settings: dict[str, Any],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="Ask this question repeatedly.")],
    camera: Annotated[
        str, option("SRC", "Watch demo, 0, /dev/video0, a URL or a file.", autocompletion=values_of("camera"))
    ] = "demo",
    state: Annotated[str | None, option("DIR", "Keep memory and events in this folder, and resume.")] = None,
    state_key_file: EncryptWith = None,
    snapshots: Snapshots = None,
    seed: Annotated[int, option("N", "Seed the demo world.", min=0)] = DEMO_SEED,
    json: Json = False,
    quiet: Annotated[bool, flag("--quiet", "Write only events, errors and data losses.")] = False,
    choice: Annotated[list[str] | None, option("TEXT", "Offer this answer; repeatable.", "yes, no", panel=RULE)] = None,
    answer: Annotated[list[str] | None, option("TEXT", "Open on this answer; repeatable.", "the first", panel=RULE)] = None,
    every: Annotated[float | None, option("S", "Ask every S seconds.", "each frame", panel=RULE)] = None,
    changed: Annotated[bool, flag("--changed", "Ask only when the picture changed.", panel=RULE)] = False,
    open_above: Annotated[float | None, option("P", "Open above this probability.", "0.6", panel=RULE)] = None,
    close_below: Annotated[float | None, option("P", "Close below this probability.", "0.4", panel=RULE)] = None,
    open_after: Annotated[float | None, option("S", "Open once the answer has lasted S seconds.", "0.1", panel=RULE)] = None,
    close_after: Annotated[float | None, option("S", "Close once the answer has lasted S seconds.", "0.1", panel=RULE)] = None,
    cooldown: Annotated[float | None, option("S", "Do not open again for S seconds.", "0", panel=RULE)] = None,
    schedule: Annotated[list[str] | None, option("'mon-fri 08:00-18:00'", "Ask only at these times.", panel=RULE)] = None,
    on: Annotated[Literal["open", "close", "both"], option("open|close|both", "Send these events.", panel=SEND)] = "both",
    webhook: Annotated[list[str] | None, option("URL", "Post events to this URL.", panel=SEND)] = None,
    mqtt: Annotated[list[str] | None, option("URL", "Publish to mqtt://HOST, for Home Assistant.", panel=SEND)] = None,
    apprise: Annotated[list[str] | None, option("URL", "Send alerts by apprise (ntfy, Telegram, ..).", panel=SEND)] = None,
    exec: Annotated[list[str] | None, option("CMD", "Run this program, with the event on stdin.", panel=SEND)] = None,
) -> None:
    """Report when the answer to a question becomes yes.

    Prints a line on stdout each time the watch opens or closes.
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


@with_settings(RunSettings, {None: ("model", "policy", "budget", "fps", "append", "encode", "threads")}, typed_only=True)
def serve(
    settings: dict[str, Any],
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="Read this edgevlm.toml.")] = None,
    camera: Annotated[
        list[str] | None,
        option("[NAME=]SRC", "Watch this camera; repeatable.", "demo", autocompletion=values_of("camera")),
    ] = None,
    host: Annotated[str | None, option("H", "Listen on this address.", "127.0.0.1")] = None,
    port: Annotated[int | None, option("P", "Listen on this port; 0 picks a free one.", "8000")] = None,
    key_file: KeyFile = None,
    cluster: Annotated[str | None, option("head|ADDRESS", "Start a cluster, or join the one at ADDRESS.")] = None,
    state: Annotated[str | None, option("DIR", "Keep snapshots in this folder.", "the user's state folder")] = None,
    state_key_file: EncryptWith = None,
    snapshots: Snapshots = None,
    assigned: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any key of edgevlm.toml; repeatable.", allow_from_autoenv=False),
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, flag("--quiet", "Write only errors and data losses.")] = False,
) -> None:
    """Serve cameras over HTTP, with a web page.

    Prints the page's address. Programs can talk to the server with OpenAI's clients.
    """
    with progress("starting"):
        server = needed("edgevlm.apps.serve.run", "edgevlm serve", "serve")
        configuration = needed("edgevlm.apps.serve.config", "edgevlm serve", "serve")
    if config is None and not camera and Path("edgevlm.toml").is_file():
        to_stderr("edgevlm.toml is ignored; to use it, run edgevlm serve edgevlm.toml")
    typed = {
        **settings, "state": state, "snapshots": snapshots, "state_key": of_file(state_key_file),
        "server": {"host": host, "port": port, "key": of_file(key_file)}, "cluster": {"join": cluster},
    }  # fmt: skip

    def load() -> Any:
        return configuration.settings_of(config, camera, typed, assigned or lines("EDGEVLM_SERVE_SET"))

    join = needed("edgevlm.apps.cluster.member", "--cluster", "cluster").join if load().cluster.join else None
    server.serve(load, json, quiet, join)


def check(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="Check this edgevlm.toml.")] = Path("edgevlm.toml"),
    json: Json = False,
) -> None:
    """Check a configuration without opening cameras or models."""
    from edgevlm.apps.run.output import wall_clock
    from edgevlm.apps.schemas import json_line

    config = needed("edgevlm.apps.serve.config", "edgevlm config check", "serve")
    sinks = needed("edgevlm.apps.watches.sinks", "edgevlm config check", "serve")
    try:
        settings = config.settings_of(path)
        faults = config.missing_secrets(settings, path)
    except config.ConfigError as error:
        faults = error.faults
    for line in faults:
        to_stderr(line)
    if faults:
        raise typer.Exit(2)
    for each in settings.cameras.values():
        each.address()
    config.server_key(settings.server)
    state_key(settings.state_key)
    sinks.open_sinks(settings.sinks)
    if json:
        to_stdout(json_line("config", {"time": wall_clock(), "path": str(path), "cameras": [*settings.cameras]}))
    else:
        to_stderr(f"{path}: is valid; cameras: {', '.join(settings.cameras)}")


config = plain_app({"check": check}, name="config", help="Check a server's configuration.")


def ask(
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Ask this question; default: the lines of stdin.")
    ] = None,
    stream: Annotated[str | None, option("NAME", "Ask about this camera.", "the only one")] = None,
    url: Server = LOCAL,
    since: Since = None,
    until: Until = None,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Ask a running server."""
    from edgevlm.apps.serve.client import ask_server, questions

    for each in questions(question):
        ask_server(each, stream, url, key_file, json, given(since=since, until=until))


def forget(
    stream: Stream = None,
    last: Annotated[str | None, option("1h", "Forget the last hour, or another duration.")] = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[bool, flag("--all", "Forget everything.")] = False,
    state: Annotated[str | None, option("DIR", "Forget in this state folder, which must not be in use.")] = None,
    state_key_file: StateKeyFile = None,
    url: Server = LOCAL,
    key_file: KeyFile = None,
    yes: Annotated[bool, flag("--yes", "Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """Delete what was seen, from memory and disk.

    Deletes memory rows, snapshots, thumbnails, events and journal lines of the period, on a server or in a folder. Rows of
    later frames keep information that they took from deleted rows.
    """
    from edgevlm.apps.forget import forget_folder, in_words
    from edgevlm.apps.run.clock import Span
    from edgevlm.apps.schemas import json_line
    from edgevlm.apps.serve.client import forget_served

    if last is not None and (since or until):
        raise UserError("--last cannot be combined with --since or --until; remove one of them")
    since = last or since
    if everything == bool(since or until):
        raise UserError("choose what to forget: --last 1h, --since and --until, or --all")
    span, where = Span.typed(since, until), stream or ("all cameras" if state is None else state)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("this permanently deletes data; add --yes to confirm")
        what = "all data" if everything else f"the data{span}"
        typer.confirm(f"Permanently delete {what} from {where}?", abort=True, err=True)
    if state is not None:
        done = forget_folder(state, span, stream, state_key(of_file(state_key_file)))
    else:
        done = forget_served(url, given(stream=stream, since=since, until=until, all=everything), key_file)
    for name, counts in done.items():
        to_stdout(json_line("forgotten", {"stream": name, **counts}) if json else in_words(name, counts))


def digest(
    since: Since = "8h",
    until: Until = None,
    stream: Stream = None,
    search: Annotated[str | None, option("TEXT", "Only show entries containing these words.")] = None,
    url: Server = LOCAL,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Show what happened while you were away.

    Lists a running server's journal lines and the periods in which watches were open, in order of time.
    """
    from edgevlm.apps.serve.client import show_digest

    show_digest(given(since=since, until=until, camera=stream, search=search), url, key_file, json)


def journal(
    search: Annotated[str | None, option("TEXT", "Only show lines containing these words.")] = None,
    since: Since = None,
    until: Until = None,
    stream: Stream = None,
    limit: Annotated[int, option("N", "Show the newest N lines.", min=1, max=1000)] = 100,
    url: Server = LOCAL,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Show the journals of cameras.

    A server writes a journal only if section [journal] of its configuration has every = MINUTES. The oldest line comes first.
    """
    from edgevlm.apps.journal import Line
    from edgevlm.apps.run.clock import moment
    from edgevlm.apps.schemas import json_line
    from edgevlm.apps.serve.client import journal_of

    lines = journal_of(url, given(search=search, since=since, until=until, camera=stream, limit=str(limit)), key_file)
    if not lines:
        to_stderr("no journal lines found; a server writes a journal only if it sets [journal] every = MINUTES")
    for each in reversed(lines):
        to_stdout(json_line("line", each) if json else str(Line(each["camera"], moment(each["time"]), each["text"])))

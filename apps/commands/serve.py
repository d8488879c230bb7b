"""``edgevlm serve``, ``edgevlm ask``, ``edgevlm forget``, ``edgevlm journal`` and ``edgevlm config``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, flag, lines, note, option
from edgevlm.apps.credentials import secret
from edgevlm.packages import needed

EPILOG = """
\b
Examples:
  edgevlm serve                                   serve the demo camera
  edgevlm serve --camera rtsp://HOST/PATH --model ORG/NAME
  edgevlm serve edgevlm.toml                      several cameras
  edgevlm ask "how many objects are there now?"   ask from another shell
  edgevlm ask "who came in?" --since 10m          about the last ten minutes
"""

KeyFile = Annotated[Path | None, option("FILE", "Read the server's key from this file.")]


def serve(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="Serve what this edgevlm.toml says.")] = None,
    camera: Annotated[list[str] | None, option("[NAME=]SRC", "Watch this camera; may be given again.", "demo")] = None,
    model: Annotated[str | None, option("MODEL", "Use demo, a bundle, or ORG/NAME.")] = None,
    policy: Annotated[str | None, option("NAME[:K=V,..]", "Forget by this policy.")] = None,
    budget: Annotated[str | None, option("N|6k", "Keep this many vision tokens per layer.")] = None,
    fps: Annotated[float | None, option("N", "Watch this many frames a second.")] = None,
    append: Annotated[str | None, option("auto|all|changed", "Append all of each frame, or what changed.")] = None,
    encode: Annotated[str | None, option("auto|all|changed", "Encode all of each frame, or what changed.")] = None,
    host: Annotated[str | None, option("H", "Listen at this address.", "127.0.0.1")] = None,
    port: Annotated[int | None, option("P", "Listen at this port; 0: any.", "8000")] = None,
    key_file: KeyFile = None,
    state: Annotated[str | None, option("DIR", "Keep snapshots there.", "the user's state folder")] = None,
    threads: Annotated[int | None, option("N", "Use this many CPU threads.", min=1, max=256)] = None,
    assigned: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set any key of edgevlm.toml; may be given again.", allow_from_autoenv=False
        ),
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, flag("--quiet", "Write errors only.")] = False,
) -> None:
    """Serve cameras over HTTP, with a page.

    The page is at the address it prints. Programs ask with OpenAI's clients.
    """
    from edgevlm.progress import progress

    with progress("starting"):
        server_of = needed("edgevlm.apps.serve.run", "edgevlm serve", "serve")
    shared = {"model": model, "policy": policy, "budget": budget, "fps": fps, "state": state, "threads": threads}
    shared |= {"append": append, "encode": encode}
    server = {"host": host, "port": port, "key": None if key_file is None else f"file:{key_file}"}
    given = assigned or lines("EDGEVLM_SERVE_SET")
    server_of.serve(lambda: server_of.settings_of(config, camera or [], shared, server, given), json, quiet)


def ask(
    question: Annotated[str | None, typer.Argument(metavar="QUESTION", help="Ask this; - or nothing: from stdin.")] = None,
    stream: Annotated[str | None, option("NAME", "Ask about this stream.", "the only one")] = None,
    url: Annotated[str, option("URL", "Ask the server at this address.")] = "http://127.0.0.1:8000",
    since: Annotated[str | None, option("10m|14:03", "Look at what was seen from then on.")] = None,
    until: Annotated[str | None, option("5m|14:10", "Look at what was seen until then.")] = None,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Ask a running server."""
    from edgevlm.apps.serve.client import ask_server, questions

    window = {name: text for name, text in (("since", since), ("until", until)) if text is not None}
    for each in questions(question):
        ask_server(each, stream, url, key_file, json, window)


def forget(
    stream: Annotated[str | None, option("NAME", "Forget this camera's alone.", "all")] = None,
    last: Annotated[str | None, option("1h", "Forget what was seen in this time.")] = None,
    since: Annotated[str | None, option("10m|14:03", "Forget from then on.")] = None,
    until: Annotated[str | None, option("5m|14:10", "Forget until then.")] = None,
    everything: Annotated[bool, flag("--all", "Forget all.")] = False,
    state: Annotated[Path | None, option("DIR", "Forget in this folder, which nothing uses.")] = None,
    url: Annotated[str, option("URL", "Tell the server at this address.")] = "http://127.0.0.1:8000",
    key_file: KeyFile = None,
    yes: Annotated[bool, flag("--yes", "Do not ask first.")] = False,
    json: Json = False,
) -> None:
    """Delete what was seen, from memory and disk.

    Rows of the memory, snapshots, thumbnails and events of that time go, on a running server or, with --state, in a folder.
    Rows of later frames keep what they drew from those that are deleted.
    """
    from edgevlm.apps.forget import Span, forget_folder, in_words
    from edgevlm.apps.schemas import json_line
    from edgevlm.apps.serve.client import forget_served
    from edgevlm.errors import UserError

    if last is not None and (since or until):
        raise UserError("--last is --since until now: give one of them")
    since = last or since
    span, where = Span.typed(since, until, everything), stream or ("all cameras" if state is None else str(state))
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("this deletes for good: give --yes")
        typer.confirm(f"Delete {span} of {where} for good?", abort=True, err=True)
    if state is not None:
        done = forget_folder(state, span, stream)
    else:
        times = {name: text for name, text in (("stream", stream), ("since", since), ("until", until)) if text}
        done = forget_served(url, {**times, "all": everything}, key_file)
    for name, counts in done.items():
        typer.echo(json_line("forgotten", {"stream": name, **counts}) if json else in_words(name, counts))


def digest(
    since: Annotated[str, option("8h|14:03", "Begin then.")] = "8h",
    until: Annotated[str | None, option("5m|14:10", "End then.", "now")] = None,
    camera: Annotated[str | None, option("NAME", "Tell of this camera.", "all")] = None,
    search: Annotated[str | None, option("TEXT", "Tell of what has these words.")] = None,
    url: Annotated[str, option("URL", "Ask the server at this address.")] = "http://127.0.0.1:8000",
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Tell what happened while you were away.

    A running server says when its watches were open, and what its journal says, by time.
    """
    from edgevlm.apps.serve.client import show_digest

    window = {"since": since, "until": until, "camera": camera, "search": search}
    show_digest({name: text for name, text in window.items() if text is not None}, url, key_file, json)


def journal(
    search: Annotated[str | None, option("TEXT", "Show lines that have these words.")] = None,
    since: Annotated[str | None, option("10m|14:03", "Show lines from then on.")] = None,
    until: Annotated[str | None, option("5m|14:10", "Show lines until then.")] = None,
    camera: Annotated[str | None, option("NAME", "Show this camera's alone.", "all")] = None,
    limit: Annotated[int, option("N", "Show the newest N lines.", min=1, max=1000)] = 100,
    url: Annotated[str, option("URL", "Ask the server at this address.")] = "http://127.0.0.1:8000",
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Show what cameras have written down.

    A server writes a journal where its configuration has [journal] every = MINUTES. The oldest line comes first.
    """
    from edgevlm.apps.journal import Line
    from edgevlm.apps.run.clock import moment
    from edgevlm.apps.schemas import json_line
    from edgevlm.apps.serve.client import journal_of

    wanted = {"search": search, "since": since, "until": until, "camera": camera, "limit": str(limit)}
    for each in reversed(journal_of(url, {name: text for name, text in wanted.items() if text is not None}, key_file)):
        typer.echo(json_line("line", each) if json else str(Line(each["camera"], moment(each["time"]), each["text"])))


config = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check a server's configuration.")


@config.callback()
def _config() -> None:
    """Check a server's configuration."""


@config.command("check")
def check(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="Check this edgevlm.toml.")] = Path("edgevlm.toml"),
    json: Json = False,
) -> None:
    """Check a configuration, and open nothing."""
    from edgevlm.apps.run.events import wall_clock
    from edgevlm.apps.schemas import json_line

    config = needed("edgevlm.apps.serve.config", "edgevlm config check", "serve")
    sinks = needed("edgevlm.apps.watches.sinks", "edgevlm config check", "serve")
    settings = config.read_config(path)
    for each in settings.cameras.values():
        secret(each.source)
    config.server_key(settings.server)
    sinks.open_sinks(settings.sinks)
    if json:
        typer.echo(json_line("config", {"time": wall_clock(), "path": str(path), "cameras": [*settings.cameras]}))
    else:
        note(f"{path}: {len(settings.cameras)} cameras, nothing wrong")

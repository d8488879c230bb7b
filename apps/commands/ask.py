"""What a running server is asked and told: ``edgevlm ask``, ``digest``, ``journal`` and ``forget``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, KeyFile, StateKeyFile, flag, given, of_file, option
from edgevlm.errors import UserError
from edgevlm.progress import to_stderr

EPILOG = """
\b
Examples:
  edgevlm ask "how many objects are there now?"
  edgevlm ask "who came in?" --since 10m          about the last ten minutes
  edgevlm digest --since 8h                       what happened in the night
  edgevlm journal --search bicycle                what a camera wrote down
  edgevlm forget --since 13:30 --until 14:00      delete half an hour
"""

Server = Annotated[str, option("URL", "Talk to the server at this address.")]
Stream = Annotated[str | None, option("NAME", "Use this camera only.", "all")]
Since = Annotated[str | None, option("10m|14:03", "Begin this long ago, or at this time.")]
Until = Annotated[str | None, option("5m|14:10", "End this long ago, or at this time.", "now")]
LOCAL = "http://127.0.0.1:8000"


def ask(
    question: Annotated[str | None, typer.Argument(metavar="QUESTION", help="Ask this; - or nothing: from stdin.")] = None,
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
    last: Annotated[str | None, option("1h", "Forget what was seen in this time.")] = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[bool, flag("--all", "Forget all.")] = False,
    state: Annotated[str | None, option("DIR", "Forget in this folder, which nothing uses.")] = None,
    state_key_file: StateKeyFile = None,
    url: Server = LOCAL,
    key_file: KeyFile = None,
    yes: Annotated[bool, flag("--yes", "Do not ask first.")] = False,
    json: Json = False,
) -> None:
    """Delete what was seen, from memory and disk.

    Rows of the memory, snapshots, thumbnails, events and the journal of that time go: on a server, or in a folder.
    Rows of later frames keep what they drew from those that are deleted.
    """
    from edgevlm.apps.credentials import state_key
    from edgevlm.apps.forget import Span, forget_folder, in_words
    from edgevlm.apps.schemas import json_line
    from edgevlm.apps.serve.client import forget_served

    if last is not None and (since or until):
        raise UserError("--last is --since until now: give one of them")
    since = last or since
    span, where = Span.typed(since, until, everything), stream or ("all cameras" if state is None else state)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("this deletes for good: give --yes")
        typer.confirm(f"Delete {span} of {where} for good?", abort=True, err=True)
    if state is not None:
        done = forget_folder(state, span, stream, state_key(of_file(state_key_file)))
    else:
        done = forget_served(url, given(stream=stream, since=since, until=until, all=everything), key_file)
    for name, counts in done.items():
        typer.echo(json_line("forgotten", {"stream": name, **counts}) if json else in_words(name, counts))


def digest(
    since: Since = "8h",
    until: Until = None,
    stream: Stream = None,
    search: Annotated[str | None, option("TEXT", "Show what has these words.")] = None,
    url: Server = LOCAL,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Show what happened while you were away.

    A running server says when its watches were open, and what its journal says, by time.
    """
    from edgevlm.apps.serve.client import show_digest

    show_digest(given(since=since, until=until, camera=stream, search=search), url, key_file, json)


def journal(
    search: Annotated[str | None, option("TEXT", "Show lines that have these words.")] = None,
    since: Since = None,
    until: Until = None,
    stream: Stream = None,
    limit: Annotated[int, option("N", "Show the newest N lines.", min=1, max=1000)] = 100,
    url: Server = LOCAL,
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

    lines = journal_of(url, given(search=search, since=since, until=until, camera=stream, limit=str(limit)), key_file)
    if not lines:
        to_stderr("no line was found; a server writes a journal where its configuration has [journal] every = MINUTES")
    for each in reversed(lines):
        typer.echo(json_line("line", each) if json else str(Line(each["camera"], moment(each["time"]), each["text"])))

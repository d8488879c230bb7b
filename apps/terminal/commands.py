"""Execute lines typed during a run (questions and slash commands), at the prompt or on a pipe."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from edgevlm.apps.run.loop import RunLoop
from edgevlm.errors import UserError, nearest
from edgevlm.progress import Notify
from edgevlm.runtime.taught import all_questions

COMMANDS = {
    "/help": "list these commands",
    "/questions": "list what the model can be asked",
    "/since": "ask about a window of time: /since 10m [until 5m] QUESTION",
    "/policy": "show the memory's policy and how full it is",
    "/quit": "end the run (also ctrl-D)",
}
GENERAL = ("What is happening now?", "What has changed?", "What did you see first?", "Has anybody left?")


class Commands:
    """Executes the lines that a person types. ``say`` shows that person a line."""

    def __init__(self, run: RunLoop, say: Notify) -> None:
        self._run, self._say = run, say

    def __call__(self, line: str) -> None:
        """Execute a slash command or ask a question; report an error in one line."""
        try:
            if is_command(line):
                for each in self._command(line.split()[0]):
                    self._say(each)
            elif line.strip():
                self._run.ask_typed(line.strip())
        except UserError as error:
            self._say(str(error))

    def questions(self) -> list[str]:
        """Return suggested questions; those about objects that have left the picture come first."""
        if not self._run.session.model.is_demo:
            return list(GENERAL)
        scene = self._run.frame.scene if self._run.frame is not None else None
        gone = [fact.question for fact in scene.departed()] if scene is not None else []
        return [*gone, *(text for text in all_questions() if "<" not in text)]

    def _command(self, name: str) -> list[str]:
        session = self._run.session
        if name == "/help":
            return [f"{name:<12} {what}" for name, what in COMMANDS.items()]
        if name == "/questions":
            return all_questions() if session.model.is_demo else ["any question in plain words, such as:", *GENERAL]
        if name == "/policy":
            held = f"{session.stats.tokens:,} of {session.budget:,} tokens a layer, {session.stats.cache_bytes / 1e6:.1f} MB"
            return [f"policy {session.policy}, {held}; {session.basis}".removesuffix("; ")]
        if name != "/quit":
            raise UserError(f"unknown command {name}; {nearest(name, COMMANDS)}")
        self._run.shutdown.ask()
        return []


def is_command(line: str) -> bool:
    return line.lstrip().startswith("/") and line.split()[0] != "/since"


@contextmanager
def piped_questions(run: RunLoop, say: Notify, descriptor: int) -> Iterator[None]:
    """Read and execute lines from ``descriptor`` in a separate thread while the block runs.

    Questions about a live source are asked at once; questions about other sources are asked at the end.
    """
    act, over = Commands(run, say), threading.Event()

    def listen() -> None:
        with suppress(OSError), open(os.dup(descriptor), errors="replace") as lines:
            for line in filter(None, map(str.strip, lines)):
                if over.is_set():
                    return
                if run.source.live or is_command(line):
                    act(line)
                else:
                    run.plan.end.append(line)
                    run.plan.sample = None
        if os.isatty(descriptor) and not over.is_set():  # ctrl-D was typed
            run.shutdown.ask()

    threading.Thread(target=listen, name="edgevlm-stdin", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        run.started.set()


def stdin_lines(as_json: bool) -> int | None:
    """Return stdin's file descriptor, or None if no questions are read from stdin."""
    try:
        descriptor = sys.stdin.fileno()
        elsewhere = os.isatty(descriptor) and (as_json or not sys.stdout.isatty())
        return None if elsewhere else descriptor
    except (AttributeError, OSError, ValueError):
        return None

"""What can be typed while a run watches: questions and slash commands, at the prompt or on a pipe."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgevlm.apps.run.loop import RunLoop
from edgevlm.calib.demo.questions import all_questions
from edgevlm.errors import UserError, nearest
from edgevlm.progress import Notify
from edgevlm.runtime.plugins import names

COMMANDS = {
    "/help": "list these commands",
    "/questions": "list what the model can be asked",
    "/since": "ask about a window of time: /since 10m [until 5m] QUESTION",
    "/policy": "show how memory is kept small, or change it: /policy NAME",
    "/budget": "show how much memory holds, or change it: /budget 6k",
    "/save frame": "write the newest frame to a PNG file: /save frame [FILE]",
    "/quit": "end the run (also ctrl-D)",
}
GENERAL = (
    "What is happening now?", "What has changed?", "What did you see first?", "How many people are there?", "Has anybody left?",
)  # fmt: skip


class Commands:
    """Carries out typed lines. ``say`` writes a line for the person who typed."""

    def __init__(self, run: RunLoop, say: Notify) -> None:
        self._run, self._say = run, say

    def __call__(self, line: str) -> None:
        """Carry out a slash command or ask a question; an error is one line."""
        try:
            if line.startswith("/") and line.partition(" ")[0] != "/since":
                self._command(line)
            elif line.strip():
                self._run.ask_typed(line.strip())
        except UserError as error:
            self._say(str(error))

    @property
    def demo(self) -> bool:
        """Whether the model knows its own world only."""
        return self._run.session.model.is_demo

    def questions(self) -> list[str]:
        """Return questions ready to be asked, those about what the model has just seen first."""
        if not self.demo:
            return list(GENERAL)
        scene = self._run.frame.scene if self._run.frame is not None else None
        now = scene.sample(self._run.random) if scene is not None else []
        gone = [fact.question for fact in scene.departed()[:6]] if scene is not None else []
        return [*now, *gone, *(text for text in all_questions() if "<" not in text)]

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest, session = rest.strip(), self._run.session
        if name == "/help":
            lines = [f"{name:<12} {what}" for name, what in COMMANDS.items()]
            lines.append("anything else is a question about what has been seen so far")
        elif name == "/questions":
            lines = all_questions() if self.demo else ["any question in plain words, such as:", *GENERAL]
        elif name in ("/policy", "/budget") and rest:
            changed = (rest, None) if name == "/policy" else (None, rest)
            self._run.submit(lambda: self._reopen(*changed))
            return
        elif name == "/policy":
            basis = f"; {session.basis}" if session.basis else ""
            lines = [f"policy {session.policy}, budget {session.budget:,} tokens a layer{basis}"]
            lines.append(f"others: {', '.join(names('policies'))}; /policy NAME starts it with an empty memory")
        elif name == "/budget":
            held, size = session.stats.tokens, session.stats.cache_bytes / 1e6
            lines = [f"{held:,} of {session.budget:,} tokens a layer, {size:.1f} MB; /budget N changes it"]
        elif name == "/save":
            lines = [self._save(rest)]
        elif name == "/quit":
            return self._run.shutdown.ask()
        else:
            raise UserError(f"there is no command {name}; {nearest(name, list(COMMANDS))}")
        for each in lines:
            self._say(each)

    def _reopen(self, policy: str | None, budget: str | None) -> None:
        self._run.reopen(policy, budget)
        session = self._run.session
        self._say(f"policy {session.policy}, budget {session.budget:,} tokens a layer; memory starts empty")

    def _save(self, text: str) -> str:
        what, _, name = text.partition(" ")
        if what != "frame":
            raise UserError("/save saves a frame: /save frame [FILE]")
        frame = self._run.frame
        if frame is None:
            raise UserError("no frame has been watched yet")
        from edgevlm.apps.sources.opencv import load_cv2

        path = Path(name.strip() or f"frame-{time.strftime('%Y%m%d-%H%M%S')}.png").expanduser()
        cv2 = load_cv2()
        try:
            path.write_bytes(cv2.imencode(path.suffix or ".png", cv2.cvtColor(frame.image, cv2.COLOR_RGB2BGR))[1].tobytes())
        except (OSError, cv2.error) as error:
            raise UserError(
                f"{path}: cannot be written ({getattr(error, 'strerror', None) or 'not a kind of picture'})"
            ) from None
        return f"saved {path} ({frame.image.shape[1]}x{frame.image.shape[0]}, {frame.time_s:.1f} s)"


@contextmanager
def piped_questions(run: RunLoop, say: Notify, descriptor: int) -> Iterator[None]:
    """Take each line that comes on ``descriptor`` as typed, from a thread of its own, while the block runs.

    A live source is asked when the line comes; a recording that is played as fast as possible is asked at its end.
    """
    act, over = Commands(run, say), threading.Event()

    def listen() -> None:
        with suppress(OSError), open(os.dup(descriptor), errors="replace") as lines:
            for line in filter(None, map(str.strip, lines)):
                if over.is_set():
                    return
                command = line.startswith("/") and line.partition(" ")[0] != "/since"
                if command or run.source.live:
                    if not command:
                        run.started.wait()
                    act(line)
                else:
                    run.plan.end.append(line)
                    run.plan.sample = None  # they replace the demo's own
        if os.isatty(descriptor) and not over.is_set():  # ctrl-D
            run.shutdown.ask()

    threading.Thread(target=listen, name="edgevlm-stdin", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        run.started.set()


def stdin_lines(as_json: bool) -> int | None:
    """The descriptor that questions may come on: a pipe or file, or a terminal that cannot be drawn on; None otherwise."""
    try:
        descriptor = sys.stdin.fileno()
        elsewhere = os.isatty(descriptor) and (as_json or not sys.stdout.isatty())
        return None if elsewhere else descriptor
    except (AttributeError, OSError, ValueError):
        return None

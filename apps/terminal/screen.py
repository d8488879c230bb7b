"""The terminal of ``edgevlm run``: a live panel above a prompt; answers and notices scroll above both."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from prompt_toolkit import PromptSession, print_formatted_text
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.styles import Style

from edgevlm.apps.run.loop import RunLoop
from edgevlm.apps.run.memory_view import SideBySide
from edgevlm.apps.run.output import AnswerEvent, StatsEvent
from edgevlm.apps.terminal.commands import COMMANDS, Commands
from edgevlm.apps.terminal.panel import Panel, clock, draw, draw_plain, make_panel, whole_fields, wrap
from edgevlm.progress import Lost

REFRESH_S = 0.25
BELOW = 5  # lines of the screen for the prompt, the status and the newest answers
SMALLEST = "HuggingFaceTB/SmolVLM2-256M-Video-Instruct"
MENU = 6  # lines for the completion menu
HINT = FormattedText([("class:placeholder", "Tab completes, /help")])
STYLE = Style.from_dict(
    {
        "dim": "ansibrightblack", "held": "ansicyan", "gauge": "ansigreen", "right": "ansigreen", "wrong": "ansired",
        "notice": "ansiyellow", "bottom-toolbar": "noreverse ansibrightblack", "placeholder": "ansibrightblack",
    }
)  # fmt: skip


class Screen:
    """An :class:`~edgevlm.apps.run.output.Output` that draws with prompt_toolkit in its own thread."""

    _run: RunLoop
    _prompt: PromptSession[None]

    def __init__(self, quiet: bool = False) -> None:
        true_color = os.environ.get("COLORTERM") in ("truecolor", "24bit")
        colors = ColorDepth.DEPTH_24_BIT if true_color else ColorDepth.DEPTH_8_BIT
        self._depth = ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else colors
        self._quiet, self._status, self._partial = quiet, "starting", ""
        self._panel, self._image = Panel([]), np.zeros((1, 1, 3), np.uint8)
        self._size: Size | None = None
        self._over, self._is_attached = threading.Event(), False

    def answer(self, answer: AnswerEvent) -> None:
        self._partial, judge = "", "class:right" if answer.truth == answer.text else "class:wrong"
        when = clock(answer.time_s) if answer.offset is None else answer.when
        line = [("class:dim", f"[{when}] "), ("", f"{answer.question}  "), ("bold", answer.text)]
        line += [] if answer.truth is None else [(judge, f"  truth: {answer.truth}")]
        self._print([*line, ("class:dim", f"  {answer.seen}" if answer.seen else "")])

    def piece(self, text: str) -> None:
        self._partial += text

    def stats(self, stats: StatsEvent) -> None:
        self._status = str(stats)

    def summary(self, stats: StatsEvent, span: str) -> None:
        """Print the run's statistics, the scores of the compared memories, and the next steps."""
        if self._quiet:
            return
        self._print([("class:dim", stats.words(span))])
        observer, demo = self._run.observer, self._run.session.model.is_demo
        known = [f"{lane.name} {lane.right} of {lane.asked}" for lane in getattr(observer, "view", ()) if lane.asked]
        if len(known) > 1:
            self.say(f"Departed objects still known: {', '.join(known)}.")
        if demo:
            self.say(f"Next: edgevlm run --camera 0 --model {SMALLEST} watches a webcam; edgevlm serve shows the page.")

    def notice(self, text: str) -> None:
        if not self._quiet or isinstance(text, Lost):
            self.say(text, "class:notice" if isinstance(text, Lost) or text.startswith("note: ") else "")

    def say(self, text: str, style: str = "") -> None:
        self._print([(style, text)])

    @contextmanager
    def attached(self, run: RunLoop) -> Iterator[None]:
        """Draw the panel and accept input while the block runs."""
        self._run, self._prompt, self._is_attached = run, self._make_prompt(Commands(run, self.say)), True
        thread = threading.Thread(target=self._listen, name="edgevlm-prompt", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            run.started.set()
            app = self._prompt.app
            if app.loop is not None and app.is_running:
                with suppress(RuntimeError):  # the application may have ended
                    app.loop.call_soon_threadsafe(lambda: app.exit() if app.is_running and not app.is_done else None)
            thread.join(timeout=2)

    def _make_prompt(self, act: Commands) -> PromptSession[None]:
        words = WordCompleter(lambda: [*COMMANDS, *dict.fromkeys(act.questions())], True, COMMANDS, sentence=True)
        prompt: PromptSession[None] = PromptSession(
            self._message, completer=words, complete_while_typing=False,
            auto_suggest=AutoSuggestFromHistory(), placeholder=HINT, bottom_toolbar=self._toolbar,
            refresh_interval=REFRESH_S, enable_suspend=True, erase_when_done=True, style=STYLE, color_depth=self._depth,
            reserve_space_for_menu=MENU,
        )  # fmt: skip
        typed: queue.SimpleQueue[str] = queue.SimpleQueue()

        def accept(buffer: Buffer) -> bool:
            typed.put(buffer.text)
            return False

        def answer_typed() -> None:
            while (line := typed.get()) is not None and not self._over.is_set():
                act(line)

        threading.Thread(target=answer_typed, name="edgevlm-typed", daemon=True).start()
        prompt.default_buffer.accept_handler = accept
        prompt.app.before_render += lambda _: self._clear_if_resized()
        prompt.app.after_render += lambda _: self._draw_image()
        return prompt

    def _listen(self) -> None:
        """Show the prompt until ctrl-C, ctrl-D or the end of the run."""
        try:
            self._prompt.prompt(handle_sigint=False)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
        except (EOFError, OSError):  # ctrl-D was typed, or the terminal has gone
            if not self._over.is_set():
                self._run.shutdown.ask()

    def _print(self, fragments: list[tuple[str, str]]) -> None:
        """Print a line above the panel; any thread may call it."""
        app = self._prompt.app if self._is_attached else None
        columns = app.output.get_size().columns if app else shutil.get_terminal_size().columns
        text = FormattedText([part for line in wrap(fragments, columns - 1) for part in [*line, ("", "\n")]][:-1])

        def write() -> None:
            print_formatted_text(text, style=STYLE, color_depth=self._depth)

        if app is None or app.loop is None or not app.is_running or self._over.is_set():
            write()
        else:
            with suppress(RuntimeError):  # the application's loop has just ended
                app.loop.call_soon_threadsafe(lambda: run_in_terminal(write))

    def _message(self) -> FormattedText:
        """Return the panel, the unfinished answer and the prompt, to be drawn."""
        size, observer, frame = self._prompt.app.output.get_size(), self._run.observer, self._run.frame
        lines = size.rows - BELOW - (MENU if self._prompt.default_buffer.complete_state is not None else 0)
        view, self._panel = observer.view if isinstance(observer, SideBySide) else [], Panel([])
        if view and frame is not None and lines > 0:
            self._image = frame.image
            self._panel = make_panel(view, frame.image, size.columns - 1, lines)
        fragments = [fragment for line in self._panel.lines for fragment in [*line, ("", "\n")]]
        if self._partial:
            fragments += [("bold", self._partial.replace("\n", " ")[-size.columns + 2 :]), ("", "\n")]
        return FormattedText([*fragments, ("bold", "ask> ")])

    def _toolbar(self) -> FormattedText:
        return FormattedText([("", whole_fields(self._status, self._prompt.app.output.get_size().columns - 1))])

    def _clear_if_resized(self) -> None:
        """Redraw from an empty screen, because a resized terminal has wrapped its old content."""
        app = self._prompt.app
        before, self._size = self._size, app.output.get_size()
        if before not in (None, self._size) and not app.is_done:
            app.renderer.clear()

    def _draw_image(self) -> None:
        """Write the image into the area that prompt_toolkit left blank, and restore the cursor."""
        app, true_color = self._prompt.app, self._depth is ColorDepth.DEPTH_24_BIT
        screen = app.renderer.last_rendered_screen
        if app.is_done or screen is None or app.current_buffer.complete_state is not None:  # a menu covers the image
            return
        below = screen.get_cursor_position(app.layout.current_window).y
        if below < len(self._panel.lines) or (app.renderer.height_is_known and below >= app.output.get_size().rows):
            return  # the prompt is elsewhere, so the screen will be drawn again
        if self._panel.rows:
            where = self._image, self._panel.columns, self._panel.rows
            lines = draw_plain(*where) if self._depth is ColorDepth.DEPTH_1_BIT else draw(*where, true_color)
            for row, text in enumerate(lines):
                app.output.write_raw(f"\x1b7\x1b[{below - row}A\r{text}\x1b8")
        app.output.flush()

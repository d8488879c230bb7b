"""One line on the terminal that says what is being done and how far it is; on anything but a terminal, nothing."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from typing import Any, Protocol

PATIENCE_S = 0.8  # from ctrl-C until a call that does not return to Python is abandoned

Notify = Callable[[str], object]  # called with a line for the user

_shown_typing: list[Callable[[], None]] = []  # each shows again what is typed, the first as it was before the process
_shown: Step | None = None  # rich draws one display at a time: what is shown inside another's block joins it


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Report(Protocol):
    """What is told of work as it goes on: what is being done and, of a known number, how many are done."""

    def __call__(self, what: str, done: int | None = None, total: int | None = None, /) -> object: ...


class Step:
    """Called with what is being done, and of a known number how many are done; :meth:`print` writes above the line."""

    def __init__(self, display: Any = None, task: Any = None) -> None:
        self._display, self._task, self.what = display, task, ""

    def __call__(self, what: str, done: int | None = None, total: int | None = None) -> None:
        self.what = what
        if self._display is not None:
            self._display.update(self._task, description=what, completed=done or 0, total=total)

    def print(self, line: str) -> None:
        """A line on stderr that stays."""
        if self._display is None:
            to_stderr(line)
        else:
            self._display.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(what: str) -> Iterator[Step]:
    """Show ``what`` on stderr, if it is a terminal, while the block runs; the line is gone afterwards.

    What is printed meanwhile appears above it; what is typed is not shown, and waits for whoever reads it next. Ctrl-C ends
    the process within a second, also inside a call that does not return to Python: so no block that must finish its work (a
    run that ends with a snapshot) may be entered. A block inside another changes that one's line.
    """
    global _shown
    if _shown is not None:
        before = _shown.what
        _shown(what)
        try:
            yield _shown
        finally:
            _shown(before)
        return
    display = _display()
    if display is None:
        with _prompt_interrupt(None):
            yield Step()
        return
    with typing_hidden(), display, _above(display.console), _prompt_interrupt(display):
        _shown = Step(display, display.add_task(what, total=None))
        _shown.what = what
        try:
            yield _shown
        finally:
            _shown = None


@contextmanager
def typing_hidden() -> Iterator[None]:
    """What is typed on the terminal while the block runs is not shown; it waits for whoever reads it next."""
    try:
        descriptor = sys.stdin.fileno()
        shown = termios.tcgetattr(descriptor)
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            raise OSError  # a job in the background would be stopped
    except (AttributeError, OSError, ValueError, termios.error):
        yield
        return
    hidden = [*shown[:3], shown[3] & ~termios.ECHO, *shown[4:]]
    _shown_typing.append(lambda: termios.tcsetattr(descriptor, termios.TCSANOW, shown))
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, hidden)
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            _shown_typing.pop()()


def _display() -> Any:
    """rich's progress display; None where stderr is no terminal that can redraw a line."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn

    class TotalBar(BarColumn):
        def render(self, task: Task) -> Any:
            return super().render(task) if task.total is not None else ""

    class TotalCount(MofNCompleteColumn):
        def render(self, task: Task) -> Any:
            return super().render(task) if task.total is not None else ""

    console = Console(stderr=True, soft_wrap=True)
    spinner = SpinnerColumn("dots" if "utf" in console.encoding else "line")
    return Progress(
        spinner, TextColumn("{task.description}", markup=False), TotalBar(bar_width=20), TotalCount(), TimeElapsedColumn(),
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip


@contextmanager
def _above(console: Any) -> Iterator[None]:
    """What is printed goes through ``console``, above the line, where it goes to the terminal."""
    from rich.file_proxy import FileProxy

    class ConsoleStream(FileProxy):
        encoding, errors = "utf-8", "backslashreplace"  # without them click writes to the file behind

    stdout = redirect_stdout(ConsoleStream(console, sys.stdout)) if sys.stdout.isatty() else nullcontext()
    with stdout, redirect_stderr(ConsoleStream(console, sys.stderr)):
        yield


@contextmanager
def _prompt_interrupt(display: Any) -> Iterator[None]:
    """While entered, ctrl-C that Python has not answered after PATIENCE_S ends the process: C code does not see signals."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    answered, over = threading.Event(), b"\0"

    def answer(number: int, frame: Any) -> None:
        answered.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        while (told := os.read(reader, 1)) != over:
            if told == bytes([signal.SIGINT]) and not answered.wait(PATIENCE_S):
                if display is not None:
                    with suppress(Exception):
                        display.stop()
                with suppress(Exception):
                    sys.stdout.flush()
                with suppress(Exception):
                    _shown_typing[0]()
                os._exit(130)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, answer)
    thread = threading.Thread(target=watch, name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(before)
        os.write(writer, over)
        thread.join()
        os.close(reader)
        os.close(writer)

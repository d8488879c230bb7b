"""One line on the terminal that shows what is being done and how far it is; on anything but a terminal, nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Notify = Callable[[str], object]  # called with a line for the user


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Report(Protocol):
    """Called with what is being done and, of a known total, how many are done."""

    def __call__(self, what: str, done: int | None = None, total: int | None = None, /) -> object: ...


class Step:
    """A :class:`Report` that rewrites the line."""

    def __init__(self, display: Any = None, task: Any = None, what: str = "") -> None:
        self._display, self._task, self.what = display, task, what

    def __call__(self, what: str, done: int | None = None, total: int | None = None) -> None:
        self.what = what
        if self._display is not None:
            count = "" if total is None else f"{done or 0}/{total}"
            self._display.update(self._task, description=what, completed=done or 0, total=total, count=count)

    def print(self, line: str) -> None:
        to_stderr(line)


_shown: Step | None = None  # rich draws one display at a time


def show(what: str) -> None:
    """Change the line that :func:`progress` shows, if it shows one."""
    if _shown is not None:
        _shown(what)


@contextmanager
def progress(what: str) -> Iterator[Step]:
    """Show ``what`` on stderr, if it is a terminal, while the block runs; the line is gone afterwards.

    Lines printed meanwhile appear above it. A nested block changes the line.
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
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        yield Step()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    spinner = SpinnerColumn("dots" if "utf" in console.encoding else "line")
    columns = spinner, TextColumn("{task.description} {task.fields[count]}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as display:
        _shown = Step(display, display.add_task(what, total=None, count=""), what)
        try:
            yield _shown
        finally:
            _shown = None

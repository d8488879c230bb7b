"""Guard standard output and standard error, and show a progress line on a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

Notify = Callable[[str], object]  # called with a line for the user

OUTPUT = "the output"  # the file name in standard output's OSErrors
CONTROLS = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # terminal and text-direction codes
SLOW_MS = 1000  # how long a message waits for a stuck reader


class Lost(str):
    """A message that data was lost or may be lost; it is shown even with --quiet."""

    __slots__ = ()


def plain(text: str) -> str:
    """Escape control characters in untrusted text, except line ends and tabs."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def to_stdout(text: str = "", end: str = "\n") -> None:
    print(plain(text), end=end, flush=True)


def to_stderr(line: str) -> None:
    print(plain(line).replace("\n", "\\n"), file=sys.stderr, flush=True)


def to_stderr_if_lost(line: str) -> None:
    """Print a :class:`Lost` line on stderr; ignore other lines."""
    if isinstance(line, Lost):
        to_stderr(line)


class StandardOutput(io.FileIO):
    """Standard output that waits for slow readers, even on a non-blocking descriptor."""

    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:
                select.select((), (self,), ())
        except OSError as error:
            raise OSError(error.errno, error.strerror, OUTPUT) from None
        return count


class StandardError(io.FileIO):
    """Standard error that drops text if it cannot be written within SLOW_MS, as when the disk is full or the reader hangs."""

    wait_ms = SLOW_MS

    def write(self, data: Any) -> int:
        with suppress(OSError):
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            ready = poll.poll(self.wait_ms)
            self.wait_ms = SLOW_MS if ready else 0
            if ready:
                return super().write(data[: select.PIPE_BUF]) or len(data)
        return len(data)


def guard_streams(stdout: type[io.FileIO] = StandardOutput) -> None:
    """Replace closed standard streams with the null device, and make stdout a ``stdout`` and stderr a StandardError.

    Characters that a stream's encoding lacks are escaped. If the program has replaced ``sys.stdout`` or ``sys.stderr``, the
    replacement is not wrapped.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for name, kind in (("stdout", stdout), ("stderr", StandardError)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if stream is getattr(sys, f"__{name}__"):
            buffer = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
            by_line = stream.line_buffering or stream.write_through  # PYTHONUNBUFFERED sets write_through
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=by_line))


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the interpreter's flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Report(Protocol):
    """A callback that reports the current work, the number of items done and, if known, their total."""

    def __call__(self, what: str, done: int | None = None, total: int | None = None, /) -> object: ...


class Step:
    """A :class:`Report` that updates the progress line. ``doing``: the work reported most recently by any step."""

    doing = ""

    def __init__(self, display: Any = None, task: Any = None, what: str = "") -> None:
        self._display, self._task, self.what, self._first = display, task, what, (0.0, 0)

    def __call__(self, what: str, done: int | None = None, total: int | None = None) -> None:
        Step.doing = what
        if what != self.what:
            self.what, self._first = what, (time.monotonic(), done or 0)
        if self._display is not None:
            count = "" if total is None else f"{done or 0}/{total}{self._pace(done or 0, total)}"
            self._display.update(self._task, description=what, completed=done or 0, total=total, count=count)

    def _pace(self, done: int, total: int) -> str:
        """Return the time left and, for a download, its speed, or ``""`` during the first second."""
        took, gained = time.monotonic() - self._first[0], done - self._first[1]
        if took < 1 or gained <= 0:
            return ""
        left = round((total - done) * took / gained)
        return f"{f', {gained / took:.1f} MB/s' if self.what.endswith('(MB)') else ''}, {left // 60}:{left % 60:02} left"

    def print(self, line: str) -> None:
        to_stderr(line)


def counted(number: int, noun: str) -> str:
    """Return the number and the noun: ``1 frame`` or ``2 frames``."""
    return f"{number} {noun}" + "s" * (number != 1)


_shown: Step | None = None  # rich draws one display at a time


def note_stopped() -> None:
    """If ctrl-C ended a download, print that the same command resumes it."""
    if Step.doing.startswith("downloading"):
        to_stderr("stopped; run the same command to continue")


def show(what: str) -> None:
    """Change the text of the :func:`progress` line, if there is one."""
    if _shown is not None:
        _shown(what)


@contextmanager
def progress(what: str) -> Iterator[Step]:
    """Show ``what`` in a line on stderr while the block runs, if stderr is a terminal.

    While the progress line is shown, printed text appears above the line. A nested ``progress`` block changes the line's text.
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

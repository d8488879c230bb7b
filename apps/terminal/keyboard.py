"""Typed lines while the screen is redrawn: the terminal in cbreak mode, echo done by the screen."""

from __future__ import annotations

import codecs
import os
import re
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable
from contextlib import suppress

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[@-~])")  # an arrow key, a function key, the brackets around a paste
BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)$")


class Keyboard:
    """Reads stdin in a thread. ``text`` is the line being typed; ``on_line`` gets each finished one, ``on_end`` ctrl-D.

    Restores the terminal on exit. Backspace and ctrl-U edit; escape sequences (arrow keys) are ignored; ctrl-C stays a signal.
    """

    def __init__(self, on_line: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self.text = ""
        self._on_line, self._on_end = on_line, on_end
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._begun = ""  # of an escape sequence
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgevlm-keyboard", daemon=True)

    def __enter__(self) -> Keyboard:
        self._saved = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=1)
        with suppress(termios.error):  # of a terminal that has gone
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def _run(self) -> None:
        descriptor = sys.stdin.fileno()
        while not self._closing.is_set():
            if not select.select([descriptor], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(descriptor, 1024)
            except OSError:  # the terminal has gone
                data = b""
            if not data:
                return self._on_end()
            self.type(self._decode(data))

    def type(self, characters: str) -> None:
        """Take in what was read; of an escape sequence that is not whole yet the beginning is kept."""
        text = ESCAPE.sub("", self._begun + characters)
        self._begun = begun[0] if (begun := BEGUN.search(text)) else ""
        for character in text.removesuffix(self._begun):
            if character in "\r\n":
                line, self.text = self.text.strip(), ""
                if line:
                    self._on_line(line)
            elif character in "\x7f\b":
                self.text = self.text[:-1]
            elif character == "\x15":
                self.text = ""
            elif character == "\x04" and not self.text:
                self._on_end()
            elif character.isprintable():
                self.text += character

"""The terminal of ``edgevlm run``: a live status line, a prompt, and answers scrolling above them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from edgevlm.apps.run.events import Answered, Stats, describe
from edgevlm.apps.terminal.keyboard import Keyboard

if TYPE_CHECKING:
    from edgevlm.apps.run.loop import Run

PICTURE = 28  # pixels, both ways, of the demo camera drawn with half blocks


class Screen:
    """Draws with rich; questions typed are asked from a thread of their own, one after the other."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._status = "starting"
        self._partial = ""
        self._run: Run | None = None
        self._keyboard: Keyboard | None = None
        self._typed: queue.Queue[str | None] = queue.Queue()
        self.show_picture = False

    def answer(self, answered: Answered) -> None:
        self._partial = ""
        line = Text.assemble((f"[{answered.time_s:.1f} s] ", "dim"), f"{answered.question}  ", (answered.text, "bold"))
        if answered.truth is not None:
            right = answered.truth == answered.text
            line.append(f"  truth: {answered.truth}", "green" if right else "red")
        self._console.print(line)

    def piece(self, text: str) -> None:
        self._partial += text

    def stats(self, stats: Stats) -> None:
        self._status = describe(stats)

    def summary(self, stats: Stats) -> None:
        self._console.print(Text(describe(stats), "dim"))

    def notice(self, text: str) -> None:
        self._console.print(Text(text, "yellow"))

    @contextmanager
    def attached(self, run: Run) -> Iterator[None]:
        """Draw and listen while the block runs."""
        self._run = run
        asker = threading.Thread(target=self._ask_typed, name="edgevlm-prompt", daemon=True)
        with (
            Keyboard(self._typed.put, run.stop) as self._keyboard,
            Live(console=self._console, get_renderable=self._render, refresh_per_second=8, transient=True),
        ):
            asker.start()
            try:
                yield
            finally:
                self._typed.put(None)
                asker.join(timeout=2)

    def _ask_typed(self) -> None:
        while (question := self._typed.get()) is not None:
            try:
                assert self._run is not None
                self._run.ask(question, None if self._run.session.model.is_demo else "terminal")  # taught without earlier turns
            except Exception as error:
                self.notice(str(error))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        frame = self._run.frame if self._run else None
        if self.show_picture and frame is not None:
            parts.append(half_blocks(frame.image))
        if self._partial:
            parts.append(Text(self._partial, "bold"))
        typed = self._keyboard.text if self._keyboard else ""
        parts += [Text(self._status, "dim", no_wrap=True, overflow="ellipsis"), Text(f"ask> {typed}▏")]
        return Group(*parts)


def half_blocks(image: NDArray[np.uint8]) -> Text:
    """A picture of PICTURE x PICTURE pixels, two pixels a character cell."""
    rows = np.arange(PICTURE) * image.shape[0] // PICTURE
    columns = np.arange(PICTURE) * image.shape[1] // PICTURE
    small = image[rows][:, columns]
    text = Text(no_wrap=True)
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        for top, bottom in zip(upper, lower, strict=True):
            text.append("▀", f"rgb({top[0]},{top[1]},{top[2]}) on rgb({bottom[0]},{bottom[1]},{bottom[2]})")
        text.append("\n")
    return text

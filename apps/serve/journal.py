"""Writes the journal of one camera: every so often, and when much has changed, the model says in a line what it sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgevlm.apps.journal import Journal, Line, with_notes
from edgevlm.apps.serve.config import JournalSettings
from edgevlm.errors import UserError

if TYPE_CHECKING:
    from edgevlm.apps.serve.stream import CameraStream

PROMPT = "Describe in one short sentence what is happening now."
DEMO_PROMPT, BEFORE = "what left last?", "how many objects are there now?"  # before anything has left, nothing is right
SOONEST = 0.1  # of the time from line to line, where much has changed


class JournalWriter:
    """Asks a stream for lines, in a thread of its own, from :meth:`start` to :meth:`close`."""

    def __init__(self, stream: CameraStream, journal: Journal, settings: JournalSettings) -> None:
        self._stream, self._journal, self._settings = stream, journal, settings
        self._closing = threading.Event()
        self._frames = self._appended = 0  # watched, and tokens appended, at the last line
        self._told = ""
        self._thread = threading.Thread(target=self._run, name=f"edgevlm-journal-{stream.name}", daemon=True)

    def start(self) -> None:
        if self._settings.every:
            self._thread.start()

    def close(self) -> None:
        """Waits for no line: the session cancels the one at work when it is closed."""
        self._closing.set()

    def with_notes(self, question: str, window: Mapping[str, Any]) -> str:
        """A question behind the lines that have its words, as far as ``context`` tokens reach; of the window asked about.

        window: ``since`` and ``until``, seconds of the stream.
        """
        stream, most = self._stream, self._settings.context
        if not most or stream.model.is_demo:
            return question
        encode, offset = stream.model.encode, stream.observer.offset
        most += len(encode(question))

        def fits(text: str) -> bool:
            try:
                stream.session.check(text)
            except UserError:
                return False
            return len(encode(text)) <= most

        since, until = (None if window.get(name) is None else offset + window[name] for name in ("since", "until"))
        return with_notes(question, self._journal.relevant(question, since, until, stream.name), fits)

    def _run(self) -> None:
        every = 60 * self._settings.every
        last = time.monotonic() - every
        while not self._closing.wait(SOONEST * every):
            frames, memory = self._stream.session.stats.frames, self._stream.session.stats.memory
            grown = (memory.tokens_appended - self._appended) / self._stream.model.bundle.vision.tokens_per_frame
            due = time.monotonic() - last >= every or grown >= self._settings.changed
            if due and frames > self._frames and not self._stream.paused:
                last, self._frames, self._appended = time.monotonic(), frames, memory.tokens_appended
                try:
                    self._write()
                except UserError as error:
                    if str(error) != self._told and not self._closing.is_set():
                        self._stream.notice(f"no line in the journal: {error}")
                    self._told = str(error)

    def _write(self) -> None:
        stream = self._stream
        prompt = self._settings.prompt or (self._demo_prompt() if stream.model.is_demo else PROMPT)
        taught = stream.loop.as_taught(prompt)
        if taught is None:
            raise UserError("the demo model was never taught its prompt; edgevlm run --questions lists those it knows")
        session, forgotten = stream.session, self._journal.forgotten
        answer = session.ask(taught, max_tokens=min(self._settings.max_tokens, session.text_budget.answer))
        text = " ".join(answer.text.split())
        if text and not answer.cancelled:
            said, evidence = f"{prompt} {text}" if prompt.endswith("?") else text, stream.evidence(answer).get("evidence", [])
            line = Line(stream.name, stream.observer.offset + answer.time_s, said, evidence)
            self._journal.add(line, forgotten)
            stream.events.send("journal", line.json())

    def _demo_prompt(self) -> str:
        loop, now = self._stream.loop, self._stream.session.time_s
        return DEMO_PROMPT if loop.truth(DEMO_PROMPT, now) is not None else BEFORE

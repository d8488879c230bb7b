"""The newest events of a camera, in its folder, so that the node that watches it next knows them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict

from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.forget import Span
from edgevlm.apps.watches.events import EventStore, WatchEvent

FILE = "events.json"
KEPT = 64


class MovingEvents:
    """The newest event of each watch on a camera, and those that are still to be sent, KEPT at most.

    An event is written here before its node's own file has it. A folder that cannot be written is no error.
    """

    def __init__(self, shared: Shared, folder: str) -> None:
        self._shared, self._name = shared, f"{folder}/{FILE}"
        self._events: list[tuple[WatchEvent, bool]] = []  # and whether it is still to be sent
        with suppress(OSError, ValueError, TypeError, AttributeError):
            self._events = [(WatchEvent(**fields), unsent) for fields, unsent in json.loads(shared.read(self._name))]

    @property
    def is_empty(self) -> bool:
        return not self._events

    def add(self, event: WatchEvent) -> None:
        newest = {each.watch: each.id for each, _ in [*self._events, (event, True)]}
        kept = [(each, unsent) for each, unsent in self._events if each.id != event.id]
        self._events = [(each, unsent) for each, unsent in [*kept, (event, True)] if unsent or newest[each.watch] == each.id]
        self._write()

    def note_sent(self, store: EventStore) -> None:
        """See which have been sent meanwhile."""
        if any(unsent for _, unsent in self._events):
            waiting = store.unsent()
            events = [(each, unsent and each.id in waiting) for each, unsent in self._events]
            if events != self._events:
                self._events = events
                self._write()

    def forget(self, span: Span) -> None:
        """Delete events of a time, and closings of what opened then, sent or not."""
        kept = [
            each for each in self._events if not any(span.since <= at <= span.until for at in (each[0].time, each[0].opened))
        ]
        if kept != self._events:
            self._events = kept
            self._write()

    def each(self) -> list[tuple[WatchEvent, bool]]:
        """Events, oldest first, and whether they are still to be sent."""
        return list(self._events)

    def _write(self) -> None:
        self._events = self._events[-KEPT:]
        with suppress(OSError):
            self._shared.write(self._name, json.dumps([(asdict(each), unsent) for each, unsent in self._events]).encode())

"""The newest events of a camera, in its folder, so that the node that watches it next knows them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict

from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.forget import Span
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.progress import Notify

FILE = "events.json"
KEPT = 64


class MovingEvents:
    """The newest event of each watch on a camera, and the KEPT newest older ones that are still to be sent.

    An event is written here before it is in its node's own file. A folder that cannot be written is no error.
    """

    def __init__(self, shared: Shared, folder: str, notify: Notify = lambda line: None) -> None:
        self._shared, self._name, self._notify, self._is_over = shared, f"{folder}/{FILE}", notify, False
        self._events: list[tuple[WatchEvent, bool]] = []  # and whether it is still to be sent
        with suppress(OSError, ValueError, TypeError, AttributeError):
            self._events = [(WatchEvent(**fields), unsent) for fields, unsent in json.loads(shared.read(self._name))]

    @property
    def is_empty(self) -> bool:
        return not self._events

    def add(self, event: WatchEvent) -> None:
        events = [*((each, unsent) for each, unsent in self._events if each.id != event.id), (event, True)]
        newest = {each.watch: each.id for each, _ in events}
        waiting = [each.id for each, unsent in events if unsent and newest[each.watch] != each.id]
        kept = {*newest.values(), *waiting[-KEPT:]}
        self._events = [(each, unsent) for each, unsent in events if each.id in kept]
        if len(waiting) > KEPT and not self._is_over:
            self._notify(f"{event.camera}: more than {KEPT} events wait to be sent: the oldest are not sent if it moves")
        self._is_over = len(waiting) > KEPT
        self._write()

    def note_sent(self, store: EventStore) -> None:
        """Mark events that have been sent meanwhile."""
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
        with suppress(OSError):
            self._shared.write(self._name, json.dumps([(asdict(each), unsent) for each, unsent in self._events]).encode())

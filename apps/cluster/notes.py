"""Carry out requests to delete data from a node's files, memories and folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgevlm.apps.cluster.shared import MovingEvents, Shared
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.forget import Forgotten
from edgevlm.apps.run.clock import Span
from edgevlm.apps.serve.service import Service
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.snapshots.directory import snapshots
from edgevlm.runtime.snapshots.forget import AllOrNothing

COUNTED = 16  # number of forget notes whose counts of deletions are kept
Note = Mapping[str, Any]


@dataclass(slots=True)
class NoteFollower:
    """Carries out, on one node, requests to forget a period.

    The agent calls the methods while it holds its camera lock. Other threads read the fields without the lock. ``view`` returns
    the head's last answer. ``counts``: the number of deletions, by request and camera. ``refused``: why a memory could not
    forget a request's period. ``kept``: the number of the last request carried out in the node's files. ``cameras``: the number
    of the last request carried out in each camera's memory.
    """

    node: str
    service: Service
    shared: Shared
    events: Mapping[str, MovingEvents]  # events of the open cameras, by name
    view: Callable[[], Mapping[str, Any]]
    notify: Notify
    counts: dict[int, dict[str, Forgotten]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    kept: int = 0
    cameras: dict[str, int] = field(default_factory=dict)
    _stuck: str = ""
    _closed: list[tuple[str, int, object]] = field(default_factory=list)  # name, epoch and view of each camera that was closed

    def follow(self) -> None:
        """Delete the requested periods from this node's files, and from the memory of open and recently closed cameras."""
        view = self.view()
        try:
            for note in view["notes"]:
                if note["number"] > max(self.kept, view["nodes_forgot"].get(self.node, 0)):
                    self._forget_kept(note)
                for name in [name for name in self.service.streams if note in self._waiting(name)]:
                    self._forget_memory(name, note, self.service.stream(name).forget)
                    self.events[name].forget(span_of(note))
                    self.cameras[name] = note["number"]
        except (UserError, OSError) as error:
            if self._stuck != str(error):
                self._stuck = str(error)
                self.notify(f"cluster: forgotten data is not deleted yet: {mask_credentials(self._stuck)}")
        else:
            self._closed = [each for each in self._closed if each[2] is view]

    def note_closed(self, name: str, epoch: int) -> None:
        """Remember a closed camera, so that a late request to forget is still carried out on its files."""
        self._closed.append((name, epoch, self.view()))

    def follow_at(self, name: str, epoch: int, notes: Sequence[Note] | None = None) -> None:
        """Carry out ``notes`` (by default all waiting deletion requests) on a closed camera. Raises UserError and OSError."""
        where = self.shared.where(name, epoch)
        for note in self._waiting(name) if notes is None else notes:
            MovingEvents(self.shared, name, epoch).forget(span_of(note))
            if snapshots(where):
                self._forget_memory(name, note, partial(self.service.forget_at, where))
            self.cameras[name] = note["number"]

    def follow_shared(self, number: int) -> None:
        """Carry out one request to forget, in the folders of cameras that are open on no node. Raises UserError."""
        view = self.view()
        for note in [note for note in view["notes"] if note["number"] == number]:
            for name in {*view["cameras"], *view["removed"]}:
                if note["all"] and note["camera"] in (None, name):
                    self._delete_emptied(name)
            for name in view["removed"]:
                try:
                    self.follow_at(name, max(self.shared.epochs(name), default=0))
                except OSError as error:
                    raise UserError(f"{name}: snapshots cannot be read ({error})") from None

    def answer(self, number: int) -> dict[str, Any]:
        return {"streams": self.counts.get(number, {}), "refused": self.refused.get(number)}

    def waits_for(self, number: int) -> list[str]:
        """Return the names of absent nodes and closed cameras that have not carried out the request yet."""
        view = self.view()
        notes = [note for note in view["notes"] if note["number"] == number]
        nodes = [name for name, done in view["nodes_forgot"].items() if notes and done < number]
        return [*nodes, *(name for name in view["cameras_forgot"] if any(note in notes for note in self._waiting(name)))]

    def _forget_kept(self, note: Note) -> None:
        for name, epoch, _ in self._closed:
            if note["camera"] in (None, name):
                if note["all"]:
                    self._delete_emptied(name)
                elif name in self.view()["removed"] and epoch in self.shared.epochs(name):
                    self.follow_at(name, epoch, [note])
        self._count(note, self.service.forget_kept(note["camera"], Span() if note["all"] else span_of(note)))
        self.kept = note["number"]

    def _forget_memory(self, name: str, note: Note, forget: Callable[[Span], Forgotten]) -> None:
        if not note["all"]:
            try:
                self._count(note, {name: forget(span_of(note))})
            except AllOrNothing as error:
                self.refused[note["number"]] = f"{name}: {error}"
                self.notify(f"{name}: {error}")

    def _waiting(self, name: str) -> list[Note]:
        view = self.view()
        done = max(self.cameras.get(name, 0), view["cameras_forgot"].get(name, 0))
        return [note for note in view["notes"] if note["camera"] in (None, name) and note["number"] > done]

    def _delete_emptied(self, name: str) -> None:
        view = self.view()
        begins = view["cameras"].get(name, {}).get("begins", view["removed"].get(name, 0))
        with suppress(OSError):
            for epoch in self.shared.epochs(name, unfinished=True):
                if epoch < begins:
                    self.shared.delete(name, epoch)

    def _count(self, note: Note, done: Mapping[str, Forgotten]) -> None:
        add_counts(self.counts.setdefault(note["number"], {}), done)
        for number in sorted(self.counts)[:-COUNTED]:
            del self.counts[number]
            self.refused.pop(number, None)


def span_of(note: Note) -> Span:
    return Span(-math.inf if note["since"] is None else note["since"], note["until"])


def add_counts(counts: dict[str, Forgotten], more: Mapping[str, Forgotten]) -> None:
    for name, each in more.items():
        known = counts.setdefault(name, {})
        for what, count in each.items():
            known[what] = known.get(what, 0) + count

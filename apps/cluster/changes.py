"""What nodes see of a cluster, of which each is told only what has changed since it last asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WHOLE = ("watches", "notes")  # parts that change as one; others change entry by entry
View = Mapping[str, Any]  # by part
Change = tuple[str, str | None, Any]  # part, key, and what is there now: None where nothing is. Of a whole part the key is None
EMPTY: View = {
    "nodes": {}, "cameras": {}, "removed": {}, "nodes_forgot": {}, "cameras_forgot": {}, "watches": {}, "notes": [],
}  # fmt: skip


class Changes:
    """Changes of a view, numbered by a head.

    A mark says up to which change a node, or the head's file, has them. before: the mark of the file that this head began with.
    next_mark: of the file that is written before :meth:`take`.
    """

    def __init__(self, head: str, view: View, before: str | None) -> None:
        self._head, self._before, self._number = head, before, 0
        self._now = _entries(view)
        self._numbers: dict[tuple[str, str | None], int] = {}  # of the last change of each, the newest last

    @property
    def mark(self) -> str:
        return f"{self._head} {self._number}"

    @property
    def next_mark(self) -> str:
        return f"{self._head} {self._number + 1}"

    def take(self, view: View) -> None:
        """What it is now."""
        before, self._now = self._now, _entries(view)
        self._number += 1
        for key in {**before, **self._now}:
            if before.get(key) != self._now.get(key):
                self._numbers.pop(key, None)
                self._numbers[key] = self._number

    def since(self, mark: str | None) -> list[Change] | None:
        """Changes since a mark; None where it is none of this head's."""
        if not mark:
            return None
        head, _, number = (f"{self._head} 0" if mark == self._before else mark).partition(" ")
        if head != self._head:
            return None
        found: list[Change] = []
        for key, changed in reversed(self._numbers.items()):
            if changed <= int(number):
                break
            found.append((*key, self._now.get(key)))
        return found[::-1]

    def all(self) -> list[Change]:
        """What an empty view has to change."""
        return [(*key, value) for key, value in self._now.items()]


def changed(view: View, changes: Iterable[Change]) -> dict[str, Any]:
    """A view after its changes; the one before stays as it is."""
    parts: dict[str, Any] = {}
    for part, key, value in changes:
        if key is None:
            parts[part] = value
            continue
        entries = parts.setdefault(part, dict(view[part]))
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value
    return {**view, **parts}


def _entries(view: View) -> dict[tuple[str, str | None], Any]:
    return {
        (part, key): value
        for part, entries in view.items()
        for key, value in ([(None, entries)] if part in WHOLE else entries.items())
    }

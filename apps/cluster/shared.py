"""Read and write a cluster's shared storage, which is a folder or an address like ``s3://bucket/shop``."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec

from edgevlm.apps.run.clock import Span
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.progress import Notify
from edgevlm.runtime.files import UNFINISHED, private_folder
from edgevlm.runtime.snapshots.directory import LOCK, Folder, as_os_error, storage_of

EPOCH = "epoch-"  # prefix of a camera's folders; the epoch's number follows
BEGUN = "begun"
KEPT = 64  # number of unsent events to keep for each camera


class Shared:
    """A cluster's shared storage, with a folder for each epoch of a camera.

    An epoch begins when a camera moves or is reopened with new settings. Methods that delete data raise no errors. All other
    methods raise OSError. If the storage is not a folder, thumbnails stay on the node that made them.
    """

    def __init__(self, where: str) -> None:
        """Open the storage. Raises UserError for an address that fsspec does not support."""
        self._where, self._storage = where.rstrip("/"), storage_of(where)
        self._files: Any = fsspec.filesystem("file") if isinstance(self._storage, Folder) else self._storage.files

    def where(self, camera: str, epoch: int) -> str | Path:
        """Return the address or folder of a camera's snapshots in an epoch."""
        name = f"{camera}/{EPOCH}{epoch}"
        return self._storage.root / name if isinstance(self._storage, Folder) else f"{self._where}/{name}"

    def read(self, name: str) -> bytes:
        with as_os_error():
            content: bytes = self._files.cat_file(self._path(name))
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        self._make_folder(name.rpartition("/")[0])
        if isinstance(self._storage, Folder):
            with self._storage.create(Path(self._path(name))) as stream:
                stream.write(content)
        else:
            with as_os_error():
                self._files.pipe_file(self._path(name), content)

    def epochs(self, camera: str, unfinished: bool = False) -> list[int]:
        """Return the epochs that have a folder, oldest first. ``unfinished``: include incomplete copies."""
        with as_os_error():
            try:
                found = self._files.ls(self._path(camera), detail=False)
            except FileNotFoundError:
                return []
            names = [path.rstrip("/").rpartition(f"/{EPOCH}")[2] for path in found]
            epochs = sorted(int(name) for name in names if name.isdecimal())
            return [each for each in epochs if unfinished or self._is_begun(camera, each)]

    def _is_begun(self, camera: str, epoch: int) -> bool:
        return any(self._files.exists(self._path(f"{camera}/{EPOCH}{epoch}/{name}")) for name in (BEGUN, LOCK))

    def begin(self, camera: str, epoch: int, like: int | None) -> None:
        """Create an epoch's folder, unless it exists. ``like``: the epoch whose folder is copied, or None."""
        folder = f"{camera}/{EPOCH}{epoch}"
        with as_os_error():
            if self._is_begun(camera, epoch):
                return
            self._make_folder(folder)
            for path in [] if like is None else self._files.find(self._path(f"{camera}/{EPOCH}{like}")):
                name = path.rpartition("/")[2]
                if name not in (BEGUN, LOCK) and not name.endswith(UNFINISHED):
                    self._files.cp_file(path, self._path(f"{folder}/{name}"))
        self.write(f"{folder}/{BEGUN}", b"")

    def delete(self, camera: str, epoch: int) -> None:
        with suppress(OSError), as_os_error():
            self._files.rm(self._path(f"{camera}/{EPOCH}{epoch}"), recursive=True)

    def _make_folder(self, name: str) -> None:
        if isinstance(self._storage, Folder):
            private_folder(Path(self._path(name)))
        else:
            with as_os_error():
                self._storage.make_folder(self._storage.root / name)

    def _path(self, name: str) -> str:
        path = self._storage.root / name
        if isinstance(path, Path):
            for each in [path, *path.parents][: len(Path(name).parts)]:
                if each.is_symlink():
                    raise OSError(errno.ELOOP, "is a symbolic link", str(each))
        return str(path)


class MovingEvents:
    """Stores a camera's recent events for the node that the camera moves to.

    Keeps the newest event of each watch, and the newest unsent events (at most KEPT). Each event is written to the shared
    storage before it is written to the node's own file. Write errors are ignored.
    """

    FILE = "events.json"

    def __init__(self, shared: Shared, camera: str, epoch: int, notify: Notify = lambda line: None) -> None:
        self._shared, self._name, self._notify, self._is_over = shared, f"{camera}/{EPOCH}{epoch}/{self.FILE}", notify, False
        self.events: list[tuple[WatchEvent, bool]] = []  # oldest first; each with whether it is unsent
        with suppress(OSError, ValueError, TypeError, AttributeError):
            self.events = [(WatchEvent(**fields), unsent) for fields, unsent in json.loads(shared.read(self._name))]

    def add(self, event: WatchEvent) -> None:
        events = [*((each, unsent) for each, unsent in self.events if each.id != event.id), (event, True)]
        newest = {each.watch: each.id for each, _ in events}
        waiting = [each.id for each, unsent in events if unsent and newest[each.watch] != each.id]
        if len(waiting) > KEPT and not self._is_over:
            self._notify(f"{event.camera}: more than {KEPT} events wait to be sent; the oldest are lost if the camera moves")
        self._is_over = len(waiting) > KEPT
        self._replace([pair for pair in events if pair[0].id in {*newest.values(), *waiting[-KEPT:]}])

    def note_sent(self, store: EventStore) -> None:
        if any(unsent for _, unsent in self.events):
            waiting = store.unsent()
            self._replace([(each, unsent and each.id in waiting) for each, unsent in self.events])

    def forget(self, span: Span) -> None:
        """Delete the events of a period. Also delete later events of watches that opened in the period."""
        then = [each.id for each, _ in self.events if any(span.since <= at <= span.until for at in (each.time, each.opened))]
        self._replace([pair for pair in self.events if pair[0].id not in then])

    def _replace(self, events: list[tuple[WatchEvent, bool]]) -> None:
        if events != self.events:
            self.events = events
            with suppress(OSError):
                self._shared.write(self._name, json.dumps([(asdict(each), unsent) for each, unsent in events]).encode())

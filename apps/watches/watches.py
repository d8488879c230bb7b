"""Manage all watches of a service, and send their events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from edgevlm.apps.names import id_of
from edgevlm.apps.watches.delivery import Delivery
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.sinks import WatchStatus
from edgevlm.apps.watches.watch import Watch
from edgevlm.apps.watches.watcher import Watcher
from edgevlm.errors import FieldError, UserError, nearest
from edgevlm.progress import Notify

MAX_WATCHES = 256


class WatchHooks(Protocol):
    """The methods that work differently on a cluster's node."""

    def may_record(self, event: WatchEvent) -> bool: ...
    def cameras_elsewhere(self) -> Collection[str]: ...


class Watches:
    """The watches of a service, by name. Any thread may call any method.

    ``watchers``: returns the watchers by camera name. ``delivery``: returns the :class:`Delivery`, which the first call opens.
    """

    def __init__(
        self,
        watchers: Callable[[], Mapping[str, Watcher]],
        delivery: Callable[[], Delivery],
        notify: Notify,
        hooks: Callable[[], WatchHooks],
    ) -> None:
        self.watches: dict[str, Watch] = {}
        self._watchers, self._delivery, self._notify, self._hooks = watchers, delivery, notify, hooks
        self._lock = threading.RLock()
        self._announced: list[WatchStatus] = []
        self._holds, self._closed = 0, False

    def add(self, watch: Watch) -> None:
        """Add a watch. Raises FieldError if the watch's name is in use, or if one of its cameras cannot be asked."""
        self._delivery()  # not under self._lock: this takes the service's lock, whose holder may wait for self._lock
        with self._lock:
            if watch.name in self.watches:
                raise FieldError("name", f"watch {watch.name} already exists; remove it first or choose another name")
            if len(self.watches) >= MAX_WATCHES:
                raise UserError(f"the limit of {MAX_WATCHES} watches is reached; remove one first")
            there = {*self._watchers(), *self._hooks().cameras_elsewhere()}
            for camera in watch.cameras:
                if camera not in there:
                    raise FieldError("cameras", f"camera {camera!r} not found; {nearest(camera, there)}")
            chosen = self._chosen(watch)
            for watcher in chosen:
                watcher.check(watch)
            self.watches = {**self.watches, watch.name: watch}
            for watcher in chosen:
                watcher.add(watch)
        self.announce()

    def remove(self, name: str) -> None:
        """Stop asking a watch, and close it if it is open. Raises UserError for an unknown watch."""
        with self._lock:
            watch = self.watch(name)
            self.watches = {key: value for key, value in self.watches.items() if value is not watch}
            for watcher in self._chosen(watch):
                watcher.remove(watch.name)
        self.announce()

    def pause(self, name: str, paused: bool, camera: str | None = None) -> None:
        """Pause or resume a watch, on one or all of its cameras. Raises UserError for an unknown watch."""
        with self._lock:
            watch = self.watch(name)
            for watcher in self._chosen(watch):
                if camera in (None, watcher.camera):
                    watcher.pause(watch.name, paused)
        self.announce()

    def watch(self, name: str) -> Watch:
        """Return a watch by its id or original name. Raises UserError for an unknown watch."""
        if (found := self.watches.get(id_of(name))) is None:
            raise UserError(f"watch {name!r} not found; {nearest(name, self.watches)}")
        return found

    def attach(self, watcher: Watcher) -> None:
        """Start asking the watches of a newly opened camera. Report the watches that the camera's model cannot answer."""
        with self._lock:
            for watch in [each for each in self.watches.values() if not each.cameras or watcher.camera in each.cameras]:
                try:
                    watcher.add(watch)
                except UserError as error:
                    self._notify(f"{watcher.camera}: cannot ask watch {watch.name}: {error}")
        self.announce()

    def replace(self, before: Iterable[Watch], after: Iterable[Watch]) -> list[str]:
        """Replace a configuration's watches with a new configuration's watches. Return a line for each change."""
        old, new, done = list(before), list(after), []
        with self.held():
            for watch in old:
                if watch.name in self.watches and watch not in new:
                    self.remove(watch.name)
                    done.append(f"watch {watch.name}: removed")
            for watch in new:
                if watch not in old or watch.name not in self.watches:
                    try:
                        self.add(watch)
                        done.append(f"watch {watch.name}: added")
                    except UserError as error:
                        done.append(f"watch {watch.name}: {error}")
        return done

    def describe(self, name: str) -> dict[str, Any]:
        """Return the answer to ``GET /v1/watches/{name}``. Raises UserError for an unknown watch."""
        watch = self.watch(name)
        standing = [watcher.states().get(watch.name) for watcher in self._chosen(watch)]
        return {
            "id": watch.name, "object": "watch", "name": watch.label or watch.name,
            **watch.model_dump(exclude={"name", "label", "cameras"}),
            "cameras": [{key: value for key, value in each.items() if key != "watch"} for each in standing if each is not None],
        }  # fmt: skip

    def record(self, watch: Watch, event: WatchEvent, pictures: Sequence[bytes | None]) -> None:
        """Write an event, and send it if the watch is set to send events of this state."""
        if self._hooks().may_record(event):
            self._delivery().record(event, pictures, (watch.sinks or None) if watch.on in (event.state, "both") else ())

    def last(self, camera: str, watch: str) -> WatchEvent | None:
        return self._delivery().store.last(camera, watch)

    def announce(self, anyway: bool = False) -> None:
        """If any state has changed, send all watches' states to the sinks. ``anyway``: send them even if none has."""
        if self._holds or self._closed:
            return
        standing = [
            WatchStatus(
                camera, name, known.question, "open" if each["state"] == "open" else "close", each["paused"],
                known.device_class, watcher.label, known.label,
            )
            for camera, watcher in self._watchers().items()
            for name, each in watcher.states().items()
            if (known := self.watches.get(name)) is not None
        ]  # fmt: skip
        if anyway or standing != self._announced:
            self._announced = standing
            self._delivery().announce(standing)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Send no states until the block ends, so that reopening a camera or watch does not look like a removal."""
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
        self.announce()  # not after an error, as watches that are not open yet would look removed

    def close(self) -> None:
        """Send no more states, so that cameras closed at shutdown do not look removed."""
        self._closed = True

    def _chosen(self, watch: Watch) -> list[Watcher]:
        return [watcher for name, watcher in self._watchers().items() if not watch.cameras or name in watch.cameras]

    def control(self, camera: str, name: str, active: bool) -> None:
        if name in self.watches:
            self.pause(name, not active, camera)

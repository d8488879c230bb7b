"""Sends recorded events to sinks: at least once, in order, each sink by a thread of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.watches.events import Event, EventStore
from edgevlm.apps.watches.sinks import Sink
from edgevlm.errors import UserError

FIRST_S, MOST_S = 1.0, 60.0  # from one attempt to the next: doubled each time
CLOSE_S = 5.0  # that sinks have for what is still to be sent


class Delivery:
    """Records events and sends them. What is not sent when it is closed, or killed, is sent by the next one.

    An event that was sent just before a kill is sent again, with the same id. sinks: by name; events that wait for one that is
    no longer there are dropped, with a notice.
    """

    def __init__(self, store: EventStore, sinks: Mapping[str, Sink], notice: Callable[[str], object]) -> None:
        self.store, self.sinks = store, dict(sinks)
        self.recorded: Counter[tuple[str, str, str]] = Counter()  # by camera, watch and state
        self.delivered: Counter[str] = Counter()  # by sink
        self.failures: Counter[str] = Counter()
        self._notice = notice
        self._closing, self._end = threading.Event(), 0.0
        self._wakes = {name: threading.Event() for name in sinks}
        for name, count in store.waiting().items():
            if name not in self.sinks:
                notice(f"sink {name} is not configured any more: {count} events for it are dropped")
                store.drop(name)
        self._threads = [
            threading.Thread(target=self._send, args=(name,), name=f"edgevlm-sink-{name}", daemon=True) for name in sinks
        ]
        for thread in self._threads:
            thread.start()

    def record(self, event: Event, pictures: Sequence[bytes | None] = (), sinks: Iterable[str] | None = None) -> None:
        """Write an event, then send it: to these sinks, to all unless given. See :meth:`EventStore.record`."""
        self.store.record(event, pictures, self.sinks if sinks is None else sinks)
        self.recorded[event.camera, event.watch, event.state] += 1
        for wake in self._wakes.values():
            wake.set()

    def close(self) -> None:
        """Try once more what is still to be sent, for CLOSE_S seconds at most. The store stays open."""
        self._end = time.monotonic() + CLOSE_S
        self._closing.set()
        for wake in self._wakes.values():
            wake.set()
        for thread in self._threads:
            thread.join(max(0.0, self._end - time.monotonic()))
        for sink in self.sinks.values():
            with suppress(Exception):
                sink.close()

    def _send(self, name: str) -> None:
        """Send a sink's events until it is closed and none is left, or one fails then."""
        sink, wake, failed = self.sinks[name], self._wakes[name], 0
        while not self._closing.is_set() or time.monotonic() < self._end:
            wake.clear()
            found = self.store.next(name)
            if found is None:
                if self._closing.is_set():
                    return
                wake.wait()
                continue
            try:
                sink.send(*found)
            except Exception as error:
                self.failures[name] += 1
                if not failed:
                    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                    self._notice(f"sink {name}: {mask_credentials(what)}; what waits for it is tried again")
                failed += 1
                if self._closing.wait(min(MOST_S, FIRST_S * 2.0 ** min(failed - 1, 30)) * random.uniform(0.5, 1.0)):
                    return
                continue
            self.store.sent(name, found[0].id)
            self.delivered[name] += 1
            if failed:
                self._notice(f"sink {name}: takes events again")
            failed = 0

"""Send events to sinks at least once and in order."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.apps.watches.sinks import Program, Sink, WatchStatus
from edgevlm.errors import UserError
from edgevlm.progress import Lost, Notify
from edgevlm.runtime.plugins import blamed

FIRST_S, MOST_S = 1.0, 60.0  # the pause between attempts doubles from FIRST_S to MOST_S seconds
CLOSE_S = 2.0


class Delivery:
    """Records events and sends them to sinks, with one thread per sink.

    Events that are unsent at :meth:`close` are sent by the next Delivery. An event sent just before the process is killed is
    sent again, with the same id. ``control``: a function for sinks to call, with a camera, a watch, and True to resume the
    watch or False to pause it. ``program``: describes the process that sends the events.
    """

    def __init__(
        self,
        store: EventStore,
        sinks: Mapping[str, Sink],
        notify: Notify,
        control: Callable[[str, str, bool], object] = Sink.control,
        program: Program = Sink.program,
    ) -> None:
        self.store, self.notify, self._control, self._program = store, notify, control, program
        self.recorded: Counter[tuple[str, str, str]] = Counter()  # number of events by camera, watch and state
        self.delivered: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._watches: Sequence[WatchStatus] | None = None
        self._standing = threading.Lock()  # held during announcements, which must stay in order
        self.sinks: Collection[str] = ()
        self._senders: dict[str, Sender] = {}
        self.replace(sinks)

    def replace(self, sinks: Mapping[str, Sink]) -> None:
        """Replace the sinks. Drop the events that wait for a removed sink, and print their number."""
        self.sinks = tuple(sinks)
        self.close()
        for name, count in self.store.waiting().items():
            if name not in sinks:
                self.notify(Lost(f"sink {name} is no longer configured; dropped {count} unsent events"))
                self.store.drop(name)
        self._senders = {name: Sender(name, sink, self) for name, sink in sinks.items()}
        for sink in sinks.values():
            sink.control, sink.program = self._control, self._program
            sink.start()
        with self._standing:
            self._announce_all(self._watches)
        for sender in self._senders.values():
            sender.start()

    def record(self, event: WatchEvent, pictures: Sequence[bytes | None] = (), sinks: Iterable[str] | None = None) -> None:
        """Write an event, then send it to the named sinks, by default to all sinks. See :meth:`EventStore.record`."""
        names = self.sinks
        self.store.record(event, pictures, names if sinks is None else set(names).intersection(sinks))
        self.recorded[event.camera, event.watch, event.state] += 1
        with self._standing:
            self._announce_all(self._watches and [
                replace(each, state=event.state) if (each.camera, each.watch) == (event.camera, event.watch) else each
                for each in self._watches
            ])  # fmt: skip
        for sender in self._senders.values():
            sender.wake.set()

    def announce(self, watches: Sequence[WatchStatus]) -> None:
        """Announce all watches to the sinks, after a watch was added, removed or paused."""
        with self._standing:
            self._announce_all(watches)

    def _announce_all(self, watches: Sequence[WatchStatus] | None) -> None:
        self._watches = watches
        for sender in list(self._senders.values()):
            if watches is not None:
                with suppress(Exception):  # a package's sink may raise anything
                    sender.sink.announce(watches)

    def close(self) -> None:
        """Try once more to send the waiting events, for at most CLOSE_S seconds. Does not close the event store."""
        senders, self._senders, end = self._senders.values(), {}, time.monotonic() + CLOSE_S
        for sender in senders:
            sender.end = end
            sender.ending.set()
            sender.wake.set()
        for sender in senders:
            sender.join(max(0.0, end - time.monotonic()))
            with suppress(Exception):
                sender.sink.close()


class Sender(threading.Thread):
    def __init__(self, name: str, sink: Sink, delivery: Delivery) -> None:
        super().__init__(name=f"edgevlm-sink-{name}", daemon=True)
        self.sink, self.wake, self.ending, self.end = sink, threading.Event(), threading.Event(), math.inf
        self._name, self._delivery = name, delivery

    def run(self) -> None:
        delivery, name, failed = self._delivery, self._name, 0
        while time.monotonic() < self.end:
            self.wake.clear()
            found = delivery.store.next(name)
            if found is None:
                if self.ending.is_set():
                    return
                self.wake.wait()
                continue
            try:
                with blamed("send", self.sink):
                    self.sink.send(*found)
            except Exception as error:
                delivery.failures[name] += 1
                if not failed:
                    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                    delivery.notify(f"sink {name}: {mask_credentials(what)}; unsent events will be retried")
                if self.ending.wait(min(MOST_S, FIRST_S * 2.0 ** min(failed, 30)) * random.uniform(0.5, 1.0)):
                    return
                failed += 1
                continue
            delivery.store.sent(name, found[0].id)
            delivery.delivered[name] += 1
            if failed:
                delivery.notify(f"sink {name}: accepts events again")
            failed = 0

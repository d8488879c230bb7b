"""An hour without a broker, while the clock is set back or the disk is full: what watches saw is delivered, in order.

``python tests/faults/outage.py`` runs both with mosquitto and prints what came of it. SCALE seconds of delivery's clock, from
one attempt to the next, pass in one. Halfway the clock is set back by an hour and the program is restarted; or the disk is full
from before the outage until everything was sent.
"""

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from broker import Broker, Listener, until

from edgevlm.apps.watches import delivery as module
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.apps.watches.mqtt import Mqtt

SCALE = 600.0
HOUR = 3600.0
NOW = 1_795_000_000.0
RECONNECT = (1, 120)  # seconds from one attempt of paho's to the next
TOPIC = "edgevlm/door/parcel/event"
BEFORE = 4  # events before the outage


@dataclass
class Result:
    """repeated: arrivals of one that had come. left: in the outbox at the end. kept: on the disk then. said: on stderr."""

    recorded: int
    lost: int
    repeated: int
    out_of_order: int
    left: int
    kept: int
    said: list[str]


@contextmanager
def full_disk(folder: Path):
    """No file grows beyond what the largest in the folder is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(path.stat().st_size for path in folder.iterdir()), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def outage(folder: Path, count: int = 120, full: bool = False, scale: float = SCALE) -> Result:
    """Record so many events over the hour, and wait until they have come."""
    broker, state, said = Broker(folder, lasting=True), folder / "state", []
    listener = Listener(broker, "listener")
    times = [NOW + number * HOUR / count - HOUR * (number > count // 2 and not full) for number in range(count)]
    events = [WatchEvent("door", "parcel", "open", at, 0.9, at) for at in times]

    def opened():
        mqtt = Mqtt(broker.url, timeout=1)
        mqtt._client.reconnect_delay_set(*(seconds / scale for seconds in RECONNECT))
        store = EventStore(state, said.append, days=1e5)
        return module.Delivery(store, {"mqtt": mqtt}, said.append)

    def closed(delivery):
        delivery.close()
        delivery.store.close()

    def arrived():
        return [json.loads(payload)["id"] for payload in listener.of(TOPIC)]

    def run(delivery):
        for number, event in enumerate(events[BEFORE:], BEFORE):
            delivery.record(event, [bytes(5000)])
            if number == count // 2 and not full:
                closed(delivery)
                delivery = opened()
            time.sleep(HOUR / count / scale)
        broker.start()
        until(lambda: set(arrived()) == {event.id for event in events})
        return delivery

    with patch.multiple(module, FIRST_S=1 / scale, MOST_S=60 / scale):
        delivery = opened()
        for event in events[:BEFORE]:
            delivery.record(event)
        until(lambda: len(set(arrived())) == BEFORE and not delivery.store.waiting())
        broker.stop()
        if full:
            with full_disk(state):
                delivery = run(delivery)
        else:
            delivery = run(delivery)
        until(lambda: not delivery.store._sent and delivery.store.next("mqtt") is None)
        left, kept = sum(delivery.store.waiting().values()), len(delivery.store.query(limit=2 * count))
        closed(delivery)
    got, number_of = arrived(), {event.id: number for number, event in enumerate(events)}
    listener.close()
    broker.stop()
    order = [number_of[each] for each in dict.fromkeys(got)]
    return Result(
        count, len(number_of.keys() - set(got)), Counter(got).total() - len(set(got)),
        sum(late < early for early, late in pairwise(order)), left, kept, said,
    )  # fmt: skip


if __name__ == "__main__":
    for full in (False, True):
        with tempfile.TemporaryDirectory() as scratch:
            found = outage(Path(scratch), full=full)
        print("full disk" if full else "clock set back", found, flush=True)
        if found.lost or found.out_of_order or found.left or found.kept < found.recorded:
            sys.exit(1)

"""Events reach sinks that fail, hang and come back."""

import threading
import time
from dataclasses import replace

import pytest

from edgevlm.apps.watches import delivery as delivery_module
from edgevlm.apps.watches.delivery import Delivery
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.apps.watches.sinks import Sink

NOW = 1_795_000_000.0
EVENT = WatchEvent("door", "parcel", "open", NOW, 0.97, NOW)
EVENTS = [replace(EVENT, opened=NOW - number) for number in range(5)]  # a clock that is set back
WAIT_S = 120


class Flaky(Sink):
    """Fails so many times, then takes what it is sent."""

    def __init__(self, fails=0):
        self.fails, self.got, self.closed = fails, [], False

    def send(self, event, pictures):
        if self.fails:
            self.fails -= 1
            raise OSError("https://ann:secret@host/x took nothing")
        self.got.append(event.id)

    def close(self):
        self.closed = True


class Hanging(Sink):
    def __init__(self):
        self.entered, self.released = threading.Event(), threading.Event()

    def send(self, event, pictures):
        self.entered.set()
        self.released.wait(WAIT_S)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(delivery_module, "FIRST_S", 0.01)
    monkeypatch.setattr(delivery_module, "CLOSE_S", WAIT_S)


@pytest.fixture
def store(tmp_path):
    store = EventStore(tmp_path, days=1e5)
    yield store
    store.close()


def until(true):
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_sink_that_hangs_holds_neither_the_recorder_nor_another_sink(store, monkeypatch):
    monkeypatch.setattr(delivery_module, "CLOSE_S", 0.5)
    said, hanging, good = [], Hanging(), Flaky()
    delivery = Delivery(store, {"hanging": hanging, "good": good}, said.append)
    for event in EVENTS:
        delivery.record(event)
    until(lambda: store.waiting() == {"hanging": len(EVENTS)})
    assert good.got == [event.id for event in EVENTS]
    assert hanging.entered.wait(WAIT_S)
    delivery.close()
    assert store.waiting() == {"hanging": len(EVENTS)}
    until(lambda: good.closed)
    hanging.released.set()
    next_one = Flaky()
    delivery = Delivery(store, {"hanging": next_one}, said.append)
    until(lambda: not store.waiting())
    delivery.close()
    assert set(next_one.got) >= {event.id for event in EVENTS[1:]}


def test_a_sink_that_fails_is_tried_again_in_order_and_told_of_once(store):
    said, sink = [], Flaky(fails=4)
    delivery = Delivery(store, {"phone": sink}, said.append)
    for event in EVENTS:
        delivery.record(event)
    until(lambda: len(sink.got) == len(EVENTS))
    delivery.close()
    assert sink.got == [event.id for event in EVENTS]
    first, again = said
    assert first.startswith(f"sink phone: send failed: {__file__}, line ")
    assert "OSError: https://***@host/x took nothing" in first
    assert again == "sink phone: accepts events again"
    assert (delivery.failures["phone"], delivery.delivered["phone"]) == (4, 5)

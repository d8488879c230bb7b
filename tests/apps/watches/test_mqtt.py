"""Events over a real broker, mosquitto, as Home Assistant would see them."""

import json
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from edgevlm.apps.watches import delivery as delivery_module
from edgevlm.apps.watches.delivery import Delivery
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.apps.watches.mqtt import Mqtt
from edgevlm.apps.watches.sinks import WatchStatus
from edgevlm.errors import UserError

paho = pytest.importorskip("paho.mqtt.client")
MOSQUITTO = shutil.which("mosquitto", path="/usr/local/sbin:/usr/sbin:/usr/bin")
pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed (apt-get install mosquitto)")
NOW, WAIT_S = 1_795_000_000.0, 30
EVENT = WatchEvent("door", "parcel", "open", NOW, 0.97, NOW, question="is there a parcel?")
WATCHES = [
    WatchStatus("door", "parcel", "is there a parcel?", "close"),
    WatchStatus("yard", "dog", "is there a dog?", paused=True),
]
CONFIG = "homeassistant/device/edgevlm_door/config"


class Broker:
    """mosquitto on a port of loopback; its password is ``secret``."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        passwords = folder / "passwords"
        subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, "ann", "secret"], check=True)
        passwords.chmod(0o644)
        self._config = folder / "mosquitto.conf"
        self._config.write_text(f"listener {self.port} 127.0.0.1\npassword_file {passwords}\nuser root\n")
        self.url = f"mqtt://ann:secret@127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self._process = subprocess.Popen([MOSQUITTO, "-c", self._config], stderr=subprocess.DEVNULL)
        until(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)

    def stop(self):
        self._process.kill()
        self._process.wait()


class Listener:
    """A client of its own: everything that is published, in order."""

    def __init__(self, broker):
        self.got, self.ready = [], threading.Event()
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        self.client.username_pw_set("ann", "secret")
        self.client.reconnect_delay_set(1, 1)
        self.client.on_connect = lambda *_: self.client.subscribe("#", 1)
        self.client.on_subscribe = lambda *_: self.ready.set()
        self.client.on_message = lambda _, __, message: self.got.append((message.topic, message.payload, message.retain))
        self.client.connect("127.0.0.1", broker.port)
        self.client.loop_start()
        assert self.ready.wait(WAIT_S)

    def of(self, topic):
        return [payload for each, payload, _ in list(self.got) if each == topic]

    def close(self):
        self.client.disconnect()
        self.client.loop_stop()


def until(true):
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path)
    yield broker
    broker.stop()


@pytest.fixture
def listener(broker):
    listener = Listener(broker)
    yield listener
    listener.close()


@pytest.fixture
def sink(broker):
    sink = Mqtt(broker.url)
    sink.start()
    yield sink
    sink.close()


def test_state_event_and_snapshot_are_published_and_the_last_will_says_when_it_goes(broker, listener):
    sink = Mqtt(broker.url)
    sink.start()
    sink.send(EVENT, [b"jpeg"])
    sink.send(replace(EVENT, state="close"), [])
    until(lambda: len(listener.of("edgevlm/door/parcel/state")) == 2)
    assert listener.of("edgevlm/door/parcel/state") == [b"ON", b"OFF"]
    assert listener.of("edgevlm/door/parcel/event")[0].decode() == EVENT.line()
    assert listener.of("edgevlm/door/parcel/snapshot") == [b"jpeg"]
    later = Listener(broker)
    until(lambda: len(later.got) == 3)
    assert {(topic, payload) for topic, payload, retained in later.got if retained} == {
        ("edgevlm/available", b"online"), ("edgevlm/door/parcel/state", b"OFF"), ("edgevlm/door/parcel/snapshot", b"jpeg"),
    }  # fmt: skip
    later.close()
    sink._client.socket().shutdown(socket.SHUT_RDWR)  # as when its machine loses power
    until(lambda: b"offline" in listener.of("edgevlm/available"))
    until(lambda: listener.of("edgevlm/available")[-1] == b"online")
    sink.close()
    until(lambda: listener.of("edgevlm/available")[-1] == b"offline")


def test_home_assistant_finds_the_watches_when_it_starts_and_pauses_them(listener, sink):
    told = []
    sink.control = lambda *what: told.append(what)
    sink.announce(WATCHES)
    until(lambda: listener.of(CONFIG) and listener.of("edgevlm/yard/dog/active"))
    assert listener.of("edgevlm/door/parcel/active") == [b"ON"]
    assert listener.of("edgevlm/door/parcel/state") == [b"OFF"]
    assert listener.of("edgevlm/yard/dog/active") == [b"OFF"]
    assert not listener.of("edgevlm/yard/dog/state")
    found = json.loads(listener.of(CONFIG)[0])["components"]
    assert {each["platform"] for each in found.values()} == {"binary_sensor", "image", "switch"}
    sink.announce(WATCHES)
    listener.client.publish("homeassistant/status", "online")
    until(lambda: len(listener.of(CONFIG)) == 2)
    command = next(each["command_topic"] for each in found.values() if each["platform"] == "switch")
    for payload in ("OFF", "maybe", "ON"):
        listener.client.publish(command, payload, 1)
    until(lambda: len(told) == 2)
    assert told == [("door", "parcel", False), ("door", "parcel", True)]


def test_what_is_gone_is_removed_also_after_a_restart_and_others_devices_stay(broker, listener, sink):
    foreign = json.dumps({"origin": {"name": "other"}, "availability_topic": "x", "components": {}})
    for topic, payload in (("homeassistant/device/edgevlm_x/config", foreign), ("homeassistant/device/y/config", "[")):
        listener.client.publish(topic, payload, 1, retain=True)
    sink.announce(WATCHES)
    sink.send(EVENT, [b"jpeg"])
    sink.close()
    again = Mqtt(broker.url)
    again.start()
    again.announce([replace(WATCHES[0], watch="cat", question="is there a cat?")])
    until(lambda: listener.of("homeassistant/device/edgevlm_yard/config")[-1] == b"")
    until(lambda: listener.of("edgevlm/door/parcel/snapshot")[-1] == b"")
    until(lambda: set(json.loads(listener.of(CONFIG)[-1])["components"]) == {"cat_open", "cat_snapshot", "cat_active"})
    assert json.loads(listener.of(CONFIG)[-2])["components"]["parcel_open"] == {"platform": "binary_sensor"}
    assert listener.of("homeassistant/device/edgevlm_x/config") == [foreign.encode()]
    again.close()


def test_a_broker_that_is_gone_for_a_while_gets_everything_in_order(tmp_path, broker, monkeypatch):
    monkeypatch.setattr(delivery_module, "MOST_S", 0.2)
    said, listener = [], Listener(broker)
    store = EventStore(tmp_path / "state", days=1e5)
    delivery = Delivery(store, {"mqtt": Mqtt(broker.url, timeout=1)}, said.append)
    events = [replace(EVENT, opened=NOW + number) for number in range(12)]
    for number, event in enumerate(events):
        if number == 4:
            until(lambda: not store.waiting() and len(listener.of("edgevlm/door/parcel/event")) >= 4)
            broker.stop()
        if number == 8:
            until(lambda: said)
        delivery.record(event)
    assert said[0].startswith(f"sink mqtt: mqtt://127.0.0.1:{broker.port} ")
    assert "secret" not in said[0]
    listener.ready.clear()
    broker.start()
    assert listener.ready.wait(WAIT_S)
    until(lambda: delivery.delivered["mqtt"] == 12 and not store.waiting())
    got = [json.loads(payload)["id"] for payload in listener.of("edgevlm/door/parcel/event")]
    assert list(dict.fromkeys(got))[:4] == [event.id for event in events[:4]]
    assert set(got) <= {event.id for event in events}
    delivery.close()
    store.close()
    listener.close()


def test_the_state_is_what_holds_now_also_where_closings_are_not_sent_or_come_late(tmp_path, broker):
    store = EventStore(tmp_path / "state", days=1e5)
    delivery = Delivery(store, {"mqtt": Mqtt(broker.url)}, lambda line: None)
    delivery.announce(WATCHES)
    broker.stop()
    delivery.record(EVENT)
    delivery.record(replace(EVENT, state="close"), sinks=[])
    broker.start()
    until(lambda: not store.waiting())
    delivery.close()
    listener = Listener(broker)
    until(lambda: listener.of("edgevlm/door/parcel/state"))
    assert listener.of("edgevlm/door/parcel/state") == [b"OFF"]
    store.close()
    listener.close()


def test_a_broker_that_says_nothing_is_given_up_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        sink = Mqtt(f"mqtt://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        sink.start()
        with pytest.raises(UserError, match="cannot be reached"):
            sink.send(EVENT, [])
        sink.close()


def test_a_wrong_password_is_told(broker):
    sink = Mqtt(broker.url.replace("secret", "wrong"))
    sink.start()
    with pytest.raises(UserError, match="Not authorized"):
        sink.send(EVENT, [])
    sink.close()

"""Events over a real broker, mosquitto, as Home Assistant would see them."""

import json
import re
import socket
from dataclasses import replace

import pytest

from edgevlm.apps.watches.delivery import Delivery
from edgevlm.apps.watches.events import EventStore, WatchEvent
from edgevlm.apps.watches.mqtt import Mqtt
from edgevlm.apps.watches.sinks import Program, WatchStatus

pytest.importorskip("paho.mqtt.client")
from broker import MOSQUITTO, Broker, Listener, until
from faults.outage import outage
from served import serving

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed (apt-get install mosquitto)")
NOW = 1_795_000_000.0
EVENT = WatchEvent("door", "parcel", "open", NOW, 0.97, NOW, question="is there a parcel?")
WATCHES = [
    WatchStatus("door", "parcel", "is there a parcel?", "close"),
    WatchStatus("yard", "dog", "is there a dog?", paused=True),
]
CONFIG = "homeassistant/device/edgevlm_door/config"


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
    close = replace(EVENT, state="close")
    sink.send(close, [])
    until(lambda: len(listener.of("edgevlm/door/parcel/state")) == 2)
    sink.announce([replace(WATCHES[0], device_class="door")])
    until(lambda: listener.of("edgevlm/available"))
    assert json.loads(listener.of(CONFIG)[0])["components"]["parcel_open"]["device_class"] == "door"
    assert listener.of("edgevlm/door/parcel/state") == [b"ON", b"OFF"]
    assert listener.of("edgevlm/door/parcel/event")[0].decode() == EVENT.line()
    assert listener.of("edgevlm/door/parcel/snapshot") == [b"jpeg"]
    later = Listener(broker)
    until(lambda: len(later.got) == 6)
    assert {(topic, payload) for topic, payload, retained in later.got if retained and topic != CONFIG} == {
        ("edgevlm/available", b"online"), ("edgevlm/door/parcel/state", b"OFF"), ("edgevlm/door/parcel/snapshot", b"jpeg"),
        ("edgevlm/door/parcel/attributes", close.line().encode()), ("edgevlm/door/parcel/active", b"ON"),
    }  # fmt: skip
    later.close()
    sink._client.socket().shutdown(socket.SHUT_RDWR)  # as when its machine loses power
    until(lambda: b"offline" in listener.of("edgevlm/available"))
    until(lambda: listener.of("edgevlm/available")[-1:] == [b"online"])
    sink.close()
    until(lambda: listener.of("edgevlm/available")[-1:] == [b"offline"])


def test_home_assistant_finds_the_watches_and_pauses_them(listener, sink):
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
    until(lambda: listener.of("homeassistant/device/edgevlm_yard/config")[-1:] == [b""])
    until(lambda: listener.of("edgevlm/door/parcel/snapshot")[-1:] == [b""])
    wanted = [{"cat_open", "cat_snapshot", "cat_active"}]
    until(lambda: [set(json.loads(config)["components"]) for config in listener.of(CONFIG)[-1:]] == wanted)
    assert json.loads(listener.of(CONFIG)[-2])["components"]["parcel_open"] == {"platform": "binary_sensor"}
    assert listener.of("homeassistant/device/edgevlm_x/config") == [foreign.encode()]
    order = [topic for topic, _, _ in listener.got]
    assert order[::-1].index("edgevlm/door/parcel/snapshot") < order[::-1].index(CONFIG)  # after its entity is removed
    again.close()


@pytest.mark.parametrize(("first", "second"), [("edgevlm", "edgevlm"), ("küche", "köche")])
def test_two_programs_on_a_broker_leave_each_others_devices_alone(broker, listener, first, second):
    programs = [Mqtt(f"{broker.url}/{first}", id="a_b"), Mqtt(f"{broker.url}/{second}", id="a_b" * (first != second))]
    programs[1].program = Program("0a1b2c3d", "http://0.0.0.0:8000")
    for program in programs:
        program.start()
        program.announce(WATCHES[:1])
    until(lambda: sum(topic.endswith("/available") for topic, _, _ in listener.got) == 2)
    devices = {topic: json.loads(payload) for topic, payload, _ in listener.got if topic.endswith("/config")}
    assert len({each["device"]["identifiers"][0] for each in devices.values()}) == len(devices) == 2
    assert all(re.fullmatch("homeassistant/device/[a-z0-9_-]+/config", topic) for topic in devices)
    assert "http://127.0.0.1:8000" in [each["device"].get("configuration_url") for each in devices.values()]
    programs[1].announce([])  # its only watch is removed
    until(lambda: sum(payload == b"" for _, payload, _ in listener.got) == 5)
    programs[1].close()
    left = Listener(broker)
    until(lambda: f"{first}/a_b/available" in [topic for topic, _, _ in left.got])
    assert len([topic for topic, payload, _ in left.got if topic.endswith("/config")]) == 1
    assert left.of(f"{first}/a_b/available") == [b"online"]
    for each in (left, programs[0]):
        each.close()


def test_a_server_announces_its_watches_at_once_and_again_without_a_change(broker, listener, tmp_path):
    """A restart removes nothing, and no watch is announced before the others."""
    questions = ("is there a red square?", "how many objects are there?")
    watches = ", ".join(f'{{ question = "{each}" }}' for each in questions)
    (tmp_path / "edgevlm.toml").write_text(
        f'sinks = [{{ kind = "mqtt", url = "{broker.url}" }}]\nwatches = [{watches}]\ncameras.demo.source = "demo"\n'
    )
    for _ in range(2):
        with serving(tmp_path, tmp_path / "edgevlm.toml") as served:
            until(lambda: any(payload == b"online" for _, payload, _ in listener.got))
            configs = [json.loads(payload) for topic, payload, _ in listener.got if topic.endswith("/config") and payload]
            assert {len(each["components"]) for each in configs} == {6}
            assert configs[0]["device"]["configuration_url"].startswith("http://127.0.0.1:")
        until(lambda: any(payload == b"offline" for _, payload, _ in listener.got))
        assert not [topic for topic, payload, _ in listener.got if not payload]
        listener.got.clear()
    with serving(tmp_path, tmp_path / "edgevlm.toml") as served:
        until(lambda: any(payload == b"online" for _, payload, _ in listener.got))
        served.request("DELETE", "/v1/streams/demo")
        until(lambda: sum(not payload for _, payload, _ in listener.got) == 9)
        assert next(topic for topic, payload, _ in listener.got if not payload).endswith("/config")


@pytest.mark.parametrize("full", [False, True])
def test_an_hour_without_a_broker_loses_nothing(tmp_path, full):
    """``python tests/faults/outage.py`` is the whole of it."""
    found = outage(tmp_path, 16, full, scale=3000)
    assert (found.lost, found.out_of_order, found.left, found.kept) == (0, 0, 0, 16)
    assert found.said[-1 - full] == "sink mqtt: accepts events again"
    assert [line.rpartition("events.sqlite: ")[2][:17] for line in found.said if "events.sqlite" in line] == (
        ["cannot be written"] if full else []
    )
    assert found.said.count("writing events resumed") == full
    assert "secret" not in str(found.said)


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

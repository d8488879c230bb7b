"""Events and states of watches on an MQTT broker, found by Home Assistant of itself."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgevlm import __version__
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.sinks import ANSWER_S, Seconds, Sink, WatchStatus
from edgevlm.apps.watches.watch import NAME
from edgevlm.errors import UserError

STATES = {"open": "ON", "close": "OFF"}
PORTS = {"mqtt": 1883, "mqtts": 8883}
SUPPORT_URL = "https://github.com/edgevlm/edgevlm"
ENTITIES = {  # a watch's entities in Home Assistant: platform, name, settings; T stands for the watch's topic
    "open": ("binary_sensor", "{}", {"state_topic": "T/state", "json_attributes_topic": "T/event"}),
    "snapshot": ("image", "{} (picture)", {"image_topic": "T/snapshot", "content_type": "image/jpeg"}),
    "active": ("switch", "{} (ask)", {"state_topic": "T/active", "command_topic": "T/set", "entity_category": "config"}),
}
RETAINED = ("state", "snapshot", "active")  # below a watch's topic


def is_topic(text: str) -> bool:
    """Return whether something can be published to it."""
    return not re.search(r"[+#\0\ud800-\udfff]", text) and 0 < len(text.encode()) < 1 << 16


class Mqtt(Sink):
    """Publishes to a broker, QoS 1, below the path of its address, ``edgevlm`` unless given.

    ``edgevlm/available`` is online or offline (the last will). Below ``edgevlm/CAMERA/WATCH/``: ``state`` (ON or OFF),
    ``event`` (JSON), ``snapshot`` (JPEG), ``active`` (ON or OFF), all retained but the event; ON or OFF sent to ``set`` lets
    the watch go on, or pauses it.

    discovery: the topic that Home Assistant looks for devices below; empty for none. ca: a file of certificates that a broker
    at ``mqtts://`` is known by, the system's unless given.
    """

    def __init__(
        self, url: str, password: str = "", discovery: str = "homeassistant", ca: str = "", timeout: Seconds = ANSWER_S
    ) -> None:
        try:
            parts = urlsplit(url)
            usual = PORTS[parts.scheme]
            self._host, self._port = parts.hostname or "", parts.port or usual
        except (ValueError, KeyError):
            raise UserError(f"mqtt {mask_credentials(url)}: give an address like mqtt://HOST:1883") from None
        self._prefix = unquote(parts.path).strip("/") or "edgevlm"
        for topic in (self._prefix, discovery):
            if topic and not is_topic(topic):
                raise UserError(f"mqtt: {topic!r} is no topic; leave out + and #")
        if not self._host:
            raise UserError(f"mqtt {mask_credentials(url)}: names no host; give an address like mqtt://HOST:1883")
        self._discovery, self._timeout = discovery.strip("/"), timeout
        self._shown, self._problem = f"{parts.scheme}://{self._host}:{self._port}", "not connected yet"
        self._watches: Sequence[WatchStatus] | None = None  # until they are announced
        self._standing: dict[str, str] = {}  # what was published, by topic, since it connected
        self._devices: dict[str, dict[str, str]] = {}  # that the broker holds: watches and questions, by camera
        self._lock, self._connected, self._tried = threading.RLock(), False, threading.Event()
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2)
        if parts.username:
            client.username_pw_set(unquote(parts.username), unquote(parts.password or "") or password or None)
        if parts.scheme == "mqtts":
            try:
                client.tls_set(ca or None)
            except OSError as error:
                raise UserError(f"mqtt: {ca}: cannot be read ({error.strerror})") from None
        client.will_set(f"{self._prefix}/available", "offline", 1, retain=True)
        client.on_connect, client.on_disconnect, client.on_message = self._on_connect, self._on_disconnect, self._on_message
        client.on_connect_fail = self._on_connect_fail

    def start(self) -> None:
        self._client.connect_async(self._host, self._port)
        self._client.loop_start()

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        self._tried.wait(self._timeout)
        if not self._connected:
            raise UserError(f"{self._shown} cannot be reached ({self._problem})")
        topic = self._topic(event.camera, event.watch)
        sent = [self._publish(f"{topic}/event", event.line(), retain=False)]
        sent += [self._publish(f"{topic}/snapshot", pictures[0])] if pictures else []
        state = self._state(event)
        sent.append(self._publish(f"{topic}/state", state))
        for message in sent:
            with suppress(ValueError, RuntimeError):  # it was not taken for sending
                message.wait_for_publish(self._timeout)
            if not message.is_published():
                raise UserError(f"{self._shown} did not confirm within {self._timeout:g} s")
        if self._state(event) != state:  # it changed, and a lost connection may have brought the two in another order
            self._publish(f"{topic}/state", self._state(event))

    def _state(self, event: WatchEvent) -> str:
        """Return the state of an event's watch now, where that is known; else the event's."""
        known = {(each.camera, each.watch): each.state for each in self._watches or ()}
        return STATES[known.get((event.camera, event.watch)) or event.state]

    def announce(self, watches: Sequence[WatchStatus]) -> None:
        with self._lock:
            self._watches = tuple(watches)
            if self._connected:
                self._announce()

    def close(self) -> None:
        was_connected = self._connected
        if was_connected:
            with suppress(ValueError, RuntimeError):
                self._publish(f"{self._prefix}/available", "offline").wait_for_publish(1)
        self._client.disconnect()
        if was_connected:  # else its thread may be waiting for an answer; it ends by itself
            self._client.loop_stop()

    def _topic(self, camera: str, watch: str) -> str:
        return f"{self._prefix}/{camera}/{watch}"

    def _publish(self, topic: str, payload: str | bytes, retain: bool = True) -> paho.MQTTMessageInfo:
        return self._client.publish(topic, payload, 1, retain)

    def _on_connect(self, client: paho.Client, userdata: object, flags: object, reason: Any, properties: object) -> None:
        if reason.is_failure:
            self._failed(str(reason))
            return
        self._publish(f"{self._prefix}/available", "online")
        client.subscribe(f"{self._prefix}/+/+/set", 1)
        if self._discovery:
            client.subscribe([(f"{self._discovery}/status", 1), (f"{self._discovery}/device/+/config", 1)])
        with self._lock:
            self._connected = True
            self._standing.clear()
            self._tried.set()
            self._announce()

    def _on_disconnect(self, client: paho.Client, userdata: object, flags: object, reason: Any, properties: object) -> None:
        if self._connected:  # not where it was just refused
            self._failed(str(reason))

    def _on_connect_fail(self, client: paho.Client, userdata: object) -> None:
        self._failed("nothing answers")

    def _failed(self, problem: str) -> None:
        self._problem, self._connected = problem, False
        self._tried.set()

    def _on_message(self, client: paho.Client, userdata: object, message: paho.MQTTMessage) -> None:
        with suppress(Exception):  # whatever others send, the connection stays
            if message.topic == f"{self._discovery}/status":
                with self._lock:
                    self._announce(again=message.payload == b"online")
            elif message.topic.startswith(f"{self._discovery}/device/"):
                if message.retain:
                    self._found(message.topic.split("/")[-2], json.loads(message.payload))
            elif message.payload in (b"ON", b"OFF"):
                camera, watch, _ = message.topic.removeprefix(f"{self._prefix}/").split("/")
                self.control(camera, watch, message.payload == b"ON")

    def _found(self, device: str, held: Any) -> None:
        """Remove what is gone of a device that the broker holds, where it is one of ours."""
        if held["availability_topic"] == f"{self._prefix}/available" and held["origin"]["name"] == "edgevlm":
            watches = {key.removesuffix("_open"): "" for key in held["components"] if re.fullmatch(f"{NAME[1:-1]}_open", key)}
            camera = device.removeprefix(self._device(""))
            with self._lock:
                self._devices[camera] = {**watches, **self._devices.get(camera, {})}
                self._announce()

    def _announce(self, again: bool = False) -> None:
        """Publish the devices that changed, or all of them ``again``, and how their watches stand."""
        if self._watches is None:
            return
        wanted: dict[str, dict[str, str]] = {}
        for each in self._watches:
            wanted.setdefault(each.camera, {})[each.watch] = each.question
        for camera in {**self._devices, **wanted} if self._discovery else ():
            before, now = self._devices.pop(camera, {}), wanted.get(camera, {})
            gone = [watch for watch in before if watch not in now]
            for topic in (f"{self._topic(camera, watch)}/{each}" for watch in gone for each in RETAINED):
                self._publish(topic, "")
            if gone or before != now or again:
                self._configure(camera, now, gone if now else [])
            if gone and now:
                self._configure(camera, now)
            if now:
                self._devices[camera] = now
        for each in self._watches:
            topic = self._topic(each.camera, each.watch)
            standing = {f"{topic}/active": "OFF" if each.paused else "ON"}
            if each.state is not None:
                standing[f"{topic}/state"] = STATES[each.state]
            for topic, payload in standing.items():
                if again or self._standing.get(topic) != payload:
                    self._publish(topic, payload)
            self._standing |= standing

    def _device(self, camera: str) -> str:
        return re.sub(r"[^a-zA-Z0-9_-]", "_", f"{self._prefix}_{camera}")

    def _configure(self, camera: str, watches: Mapping[str, str], gone: Sequence[str] = ()) -> None:
        """Publish what Home Assistant is to show of a camera, nothing where it has no watches; gone: watches to remove."""
        device, components = self._device(camera), dict[str, dict[str, Any]]()
        for kind, (platform, name, settings) in ENTITIES.items():
            components |= {f"{watch}_{kind}": {"platform": platform} for watch in gone}
            for watch, question in watches.items():
                topic = self._topic(camera, watch)
                components[f"{watch}_{kind}"] = {
                    "unique_id": f"{device}_{watch}_{kind}", "qos": 1, "platform": platform, "name": name.format(question),
                    **{key: value.replace("T/", f"{topic}/") for key, value in settings.items()},
                }  # fmt: skip
        about = {
            "device": {"identifiers": [device], "name": camera, "manufacturer": "edgevlm", "sw_version": __version__},
            "origin": {"name": "edgevlm", "sw_version": __version__, "support_url": SUPPORT_URL},
            "availability_topic": f"{self._prefix}/available",
            "components": components,
        }
        self._publish(f"{self._discovery}/device/{device}/config", json.dumps(about) if components else "")

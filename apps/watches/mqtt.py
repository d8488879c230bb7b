"""Publish events and states of watches to an MQTT broker, with Home Assistant discovery."""

from __future__ import annotations

import json
import platform
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgevlm import __version__
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.names import ID, Id, id_of
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.sinks import ANSWER_S, Seconds, Sink, WatchStatus
from edgevlm.errors import UserError

STATES = {"open": "ON", "close": "OFF"}
PORTS = {"mqtt": 1883, "mqtts": 8883}
SUPPORT_URL = "https://github.com/edgevlm/edgevlm"
ENTITIES = {  # platform, name and settings of a watch's entities in Home Assistant; T is the watch's topic
    "open": ("binary_sensor", "{}", {
        "state_topic": "T/state", "json_attributes_topic": "T/attributes",
        "json_attributes_template": "{{ value or '{}' }}",  # an empty message means that the watch was removed
    }),
    "snapshot": ("image", "{} (picture)", {"image_topic": "T/snapshot", "content_type": "image/jpeg"}),
    "active": ("switch", "{} (ask)", {"state_topic": "T/active", "command_topic": "T/set", "entity_category": "config"}),
}  # fmt: skip
COMPONENT = f"{ID[1:-1]}_(open|snapshot|active)"
RETAINED = ("attributes", "state", "snapshot", "active")
Key = tuple[str, str]  # camera and watch


def is_topic(text: str) -> bool:
    return not re.search(r"[+#\0\ud800-\udfff]", text) and 0 < len(text.encode()) < 1 << 16


class Mqtt(Sink):
    """Publishes events and states to an MQTT broker with QoS 1.

    ``edgevlm/ID/available`` is ``online``; the last will sets it to ``offline``. Topics below ``edgevlm/ID/CAMERA/WATCH/``
    are ``state`` (ON or OFF), ``event`` (JSON), ``attributes`` (the newest event), ``snapshot`` (JPEG) and ``active`` (ON or
    OFF). All topics except ``event`` are retained. ON sent to the topic ``set`` resumes the watch, and OFF pauses the watch. A
    path in the broker's address replaces ``edgevlm`` in the topics.

    ``id``: the ID in the topics, by default read from the program's state folder. ``discovery``: the beginning of Home
    Assistant's discovery topics, or an empty string to publish no such topics. ``ca``: a file of certificates for verifying an
    ``mqtts://`` broker, by default the system's.
    """

    def __init__(
        self,
        url: str,
        password: str = "",
        discovery: str = "homeassistant",
        ca: str = "",
        timeout: Seconds = ANSWER_S,
        id: Id | Literal[""] = "",
    ) -> None:
        try:
            parts = urlsplit(url)
            usual = PORTS[parts.scheme]
            self._host, self._port = parts.hostname or "", parts.port or usual
        except (ValueError, KeyError):
            raise UserError(f"mqtt {mask_credentials(url)}: invalid URL; use one like mqtt://HOST:1883") from None
        self._prefix = unquote(parts.path).strip("/") or "edgevlm"
        for topic in (self._prefix, discovery):
            if topic and not is_topic(topic):
                raise UserError(f"mqtt: invalid topic {topic!r}; remove + and #")
        if not self._host:
            raise UserError(f"mqtt {mask_credentials(url)}: host is missing; use a URL like mqtt://HOST:1883")
        self._discovery, self._timeout, self._id = discovery.strip("/"), timeout, id
        self._shown, self._problem = f"{parts.scheme}://{self._host}:{self._port}", "not connected yet"
        self._watches: dict[Key, WatchStatus] | None = None
        self._held: set[Key] = set()  # watches whose topics the broker may retain
        self._retained: dict[str, str | bytes] = {}
        self._devices: dict[str, dict[str, Any]] = {}  # devices that the broker retains, by camera
        self._here = platform.node()
        self._lock, self._connected, self._tried = threading.RLock(), False, threading.Event()
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2)
        if parts.username:
            client.username_pw_set(unquote(parts.username), unquote(parts.password or "") or password or None)
        if parts.scheme == "mqtts":
            try:
                client.tls_set(ca or None)
            except OSError as error:
                raise UserError(f"mqtt: {ca}: cannot be read ({error.strerror})") from None
        client.on_connect, client.on_disconnect, client.on_message = self._on_connect, self._on_disconnect, self._on_message
        client.on_connect_fail = self._on_connect_fail

    @property
    def _base(self) -> str:
        return "/".join(filter(None, (self._prefix, self._id or self.program.id)))

    def start(self) -> None:
        self._client.will_set(f"{self._base}/available", "offline", 1, retain=True)
        self._client.connect_async(self._host, self._port)
        self._client.loop_start()

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        self._tried.wait(self._timeout)
        if not self._connected:
            raise UserError(f"{self._shown} cannot be reached ({self._problem})")
        key, topic, line, state = (event.camera, event.watch), self._topic(event.camera, event.watch), event.line(), None
        with self._lock:
            sent = [self._publish(f"{topic}/event", line, retain=False)]
            if self._watches is None or key in self._watches:  # skip a watch that was removed
                state = self._state(event)
                retained: dict[str, str | bytes] = {f"{topic}/attributes": line}
                retained |= {f"{topic}/snapshot": pictures[0]} if pictures else {}
                retained[f"{topic}/state"] = state
                sent += [self._publish(*each) for each in retained.items()]
                self._retained |= retained
                self._held.add(key)
        for message in sent:
            with suppress(ValueError, RuntimeError):  # paho did not accept the message
                message.wait_for_publish(self._timeout)
            if not message.is_published():
                raise UserError(f"{self._shown} did not confirm within {self._timeout:g} s")
        with self._lock:
            if key in self._held and state != self._state(event):  # a reconnection may have sent the states in the wrong order
                self._publish(f"{topic}/state", self._state(event))

    def _state(self, event: WatchEvent) -> str:
        known = (self._watches or {}).get((event.camera, event.watch))
        return STATES[(known and known.state) or event.state]

    def announce(self, watches: Sequence[WatchStatus]) -> None:
        with self._lock:
            self._watches = {(each.camera, each.watch): each for each in watches}
            if self._connected:
                self._announce()

    def close(self) -> None:
        was_connected = self._connected
        if was_connected:
            with suppress(ValueError, RuntimeError):
                self._publish(f"{self._base}/available", "offline").wait_for_publish(1)
        self._client.disconnect()
        if was_connected:  # the thread of an unconnected client may be busy connecting, and ends by itself
            self._client.loop_stop()

    def _topic(self, camera: str, watch: str) -> str:
        return f"{self._base}/{camera}/{watch}"

    def _publish(self, topic: str, payload: str | bytes, retain: bool = True) -> paho.MQTTMessageInfo:
        return self._client.publish(topic, payload, 1, retain)

    def _on_connect(self, client: paho.Client, userdata: object, flags: object, reason: Any, properties: object) -> None:
        if reason.is_failure:
            self._failed(str(reason))
            return
        client.subscribe(f"{self._base}/+/+/set", 1)
        if self._discovery:
            client.subscribe(f"{self._discovery}/device/+/config", 1)
        with self._lock:
            self._connected = True
            if (link := client.socket()) is not None:  # this machine's address on the link to the broker
                here = link.getsockname()[0]
                self._here = f"[{here}]" if ":" in here else here
            self._tried.set()
            self._announce(again=True)

    def _on_disconnect(self, client: paho.Client, userdata: object, flags: object, reason: Any, properties: object) -> None:
        if self._connected:  # a refused connection was reported already
            self._failed(str(reason))

    def _on_connect_fail(self, client: paho.Client, userdata: object) -> None:
        self._failed("no answer")

    def _failed(self, problem: str) -> None:
        self._problem, self._connected = problem, False
        self._tried.set()

    def _on_message(self, client: paho.Client, userdata: object, message: paho.MQTTMessage) -> None:
        with suppress(Exception):  # no message from other clients may end the connection
            if message.topic.startswith(f"{self._discovery}/device/"):
                if message.retain and not self.program.shared:
                    self._found(message.topic.split("/")[-2], json.loads(message.payload))
            elif message.payload in (b"ON", b"OFF"):
                camera, watch, _ = message.topic.removeprefix(f"{self._base}/").split("/")
                self.control(camera, watch, message.payload == b"ON")

    def _found(self, device: str, held: Any) -> None:
        if held["availability_topic"] == f"{self._base}/available" and held["origin"]["name"] == "edgevlm":
            keys = [key for key in held["components"] if re.fullmatch(COMPONENT, key)]
            components = {key: {"platform": ENTITIES[key.rpartition("_")[2]][0]} for key in keys}
            camera = device.removeprefix(self._device(""))
            with self._lock:
                known = self._devices.get(camera, {})
                self._devices[camera] = {**known, "components": {**components, **known.get("components", {})}}
                self._held |= {(camera, key.rpartition("_")[0]) for key in components}
                self._announce()

    def _announce(self, again: bool = False) -> None:
        if self._watches is None:
            return
        wanted = self._wanted() if self._discovery else {}
        for camera in {**self._devices, **wanted}:
            before, now = self._devices.pop(camera, {}), wanted.get(camera, {})
            old, new = before.get("components", {}), now.get("components", {})
            gone = {key: {"platform": each["platform"]} for key, each in old.items() if key not in new}
            if now and gone:
                self._configure(camera, {**now, "components": {**new, **gone}})
            if again or before != now:
                self._configure(camera, now)
            if now:
                self._devices[camera] = now
        for topic in (f"{self._topic(*key)}/{each}" for key in self._held - self._watches.keys() for each in RETAINED):
            self._retained.pop(topic, None)
            self._publish(topic, "")  # Home Assistant no longer reads the topic
        self._held = set(self._watches)
        published = {} if again else dict(self._retained)
        for key, each in self._watches.items():
            self._retained[f"{self._topic(*key)}/active"] = "OFF" if each.paused else "ON"
            if each.state is not None:
                self._retained[f"{self._topic(*key)}/state"] = STATES[each.state]
        available = f"{self._base}/available"
        self._retained[available] = self._retained.pop(available, "online")  # publish availability after the states
        for topic, payload in self._retained.items():
            if published.get(topic) != payload:
                self._publish(topic, payload)

    def _device(self, camera: str) -> str:
        return f"{id_of(self._base)}_{camera}"

    def _configure(self, camera: str, device: Mapping[str, Any]) -> None:
        topic = f"{self._discovery}/device/{self._device(camera)}/config"
        self._publish(topic, json.dumps(device) if device else "")

    def _wanted(self) -> dict[str, dict[str, Any]]:
        devices: dict[str, dict[str, Any]] = {}
        for each in (self._watches or {}).values():
            device = self._device(each.camera)
            about = {
                "identifiers": [device],
                "name": each.camera_name or each.camera,
                "manufacturer": "edgevlm",
                "sw_version": __version__,
            }
            if self.program.page:
                about["configuration_url"] = re.sub(r"//(0\.0\.0\.0|\[::\])(?=:)", f"//{self._here}", self.program.page)
            components = devices.setdefault(each.camera, {
                "device": about,
                "origin": {"name": "edgevlm", "sw_version": __version__, "support_url": SUPPORT_URL},
                "availability_topic": f"{self._base}/available",
                "components": {},
            })["components"]  # fmt: skip
            for kind, (domain, name, settings) in ENTITIES.items():
                components[f"{each.watch}_{kind}"] = component = {
                    "unique_id": f"{device}.{each.watch}.{kind}", "qos": 1, "platform": domain,
                    "name": name.format(each.watch_name or each.question),
                    **{key: value.replace("T/", f"{self._topic(each.camera, each.watch)}/") for key, value in settings.items()},
                }  # fmt: skip
                if kind == "open" and each.device_class:
                    component["device_class"] = each.device_class
        return devices

"""A real MQTT broker, mosquitto, and a client of its own that hears everything."""

import random
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress

import paho.mqtt.client as paho

MOSQUITTO = shutil.which("mosquitto", path="/usr/local/sbin:/usr/sbin:/usr/bin")
WAIT_S = 120


class Broker:
    """mosquitto on a port of loopback; its password is ``secret``. lasting: a restart keeps what it holds for clients."""

    def __init__(self, folder, lasting=False):
        self.port = free_port()
        passwords = folder / "passwords"
        subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, "ann", "secret"], check=True)
        passwords.chmod(0o644)
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\npassword_file {passwords}\nuser root\npersistence {str(lasting).lower()}\n"
            f"persistence_location {folder}/\nmax_queued_messages 0\n"
        )
        self.url = f"mqtt://ann:secret@127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self._process = subprocess.Popen([MOSQUITTO, "-c", self._config], stderr=subprocess.DEVNULL)
        until(self.listens)

    def listens(self):
        with socket.socket() as link:
            return link.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self):
        self._process.terminate()
        self._process.wait()


def free_port():
    """One that nobody is given while the broker is away: below those that the system hands out."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port := random.randrange(20_000, 32_000)))
            return port


class Listener:
    """A client of its own: everything that is published, in order. name: by which a lasting broker knows it again."""

    def __init__(self, broker, name=""):
        self.got, self.ready = [], threading.Event()
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, name, not name)
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

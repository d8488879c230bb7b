"""What systemd hears of a run, over a datagram socket of the kind that it listens on."""

import os
import signal
import socket
import subprocess

import pytest
from processes import mjpeg_camera
from typed import start

from edgevlm.apps.run.process import Notifier

HUNG_MODEL = """
import sys, time
from edgevlm.runtime.session import Session
watch = Session.watch
def hangs(self, *arguments):
    watch(self, *arguments)
    if self.stats.frames == 4:
        time.sleep(600)
Session.watch = hangs
from edgevlm.__main__ import main
main()
"""


class Manager:
    """The end that a service manager holds."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(name.replace("@", "\0", 1))
        self.environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "120000000"}

    def hears(self):
        """The next message, within two minutes."""
        self.socket.settimeout(120)
        return self.socket.recv(4096).decode()

    def until(self, wanted):
        """All up to and with a message that begins so."""
        said = [self.hears()]
        while not said[-1].startswith(wanted):
            said.append(self.hears())
        return said


@pytest.fixture
def manager(request, tmp_path):
    manager = Manager(
        str(tmp_path / "notify") if getattr(request, "param", "path") == "path" else f"@edgevlm-test-{os.getpid()}"
    )
    yield manager
    manager.socket.close()


@pytest.mark.parametrize("manager", ["path", "abstract"], indirect=True)
def test_each_message(manager):
    notifier = Notifier(manager.environment)
    sent = ["READY=1", "EXTEND_TIMEOUT_USEC=120000000", "WATCHDOG=1", "STATUS=a camera:\nrunning", "STOPPING=1"]
    for message in sent:
        notifier.send(message)
    assert manager.until("STOPPING") == [" ".join(message.split()) for message in sent]


SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def test_a_run_from_its_start_to_its_end(manager):
    process = start("run", "--realtime", "--frames", "9", env=os.environ | manager.environment, **SILENT)
    said = manager.until("STOPPING=1")
    assert process.wait(120) == 0
    signs = [message for message in said if not message.startswith("STATUS=")]
    ready = signs.index("READY=1")
    assert set(signs[:ready]) <= {"EXTEND_TIMEOUT_USEC=120000000"}
    assert len(signs[ready + 1 : -1]) >= 2
    assert set(signs[ready + 1 : -1]) == {"WATCHDOG=1"}
    assert any(message.startswith("STATUS=demo: running, ") for message in said)


def test_a_camera_that_dies_is_lived_through(manager, tmp_path):
    (tmp_path / "pictures").mkdir()
    with mjpeg_camera(tmp_path / "pictures") as camera:
        timeouts = ("--open-timeout", "60", "--stall-timeout", "0.5", "--read-timeout", "1")
        watched = ("--camera", f"http://127.0.0.1:{camera.port}/live", "--fps", "10")
        process = start("run", *watched, *timeouts, env=os.environ | manager.environment, **SILENT)
        manager.until("READY=1")
        camera.kill()
        said = manager.until(f"STATUS=http://127.0.0.1:{camera.port}/live: reconnecting")
        for _ in range(3):  # the first may still be for a frame, the others are for attempts
            said += manager.until("WATCHDOG=1")
        process.send_signal(signal.SIGTERM)
        said += manager.until("STOPPING=1")
        assert process.wait(120) == 0
        camera.start()
    assert "READY=1" not in said  # once is enough


@pytest.mark.parametrize(
    ("arguments", "alive", "hung"),
    [
        (["run", "--realtime", "--frames", "50"], "STATUS=demo: running, 4 frames", {"STATUS=demo: running"}),
        (["serve", "--port", "0", "--state", "STATE"], "STATUS=1 streams, 4 frames", {"STATUS=1 streams"}),
    ],
    ids=["run", "serve"],
)
def test_a_model_that_hangs_is_heard_no_more(manager, tmp_path, arguments, alive, hung):
    if "serve" in arguments:
        pytest.importorskip("fastapi")
    typed = (str(tmp_path) if part == "STATE" else part for part in arguments)
    process = start(*typed, code=HUNG_MODEL, env=os.environ | manager.environment, **SILENT)
    try:
        manager.until("READY=1")
        for _ in range(3):  # a sign of life may be a tick behind
            manager.until(alive)
        assert {manager.hears().split(",")[0] for _ in range(3)} == hung
    finally:
        process.kill()
        process.wait()

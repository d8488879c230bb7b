"""What systemd hears of a run, over a datagram socket of the kind that it listens on."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from processes import mjpeg_camera

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

    def heard(self):
        """All that has been said and not been heard."""
        self.socket.setblocking(False)
        said = []
        while True:
            try:
                said.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return said

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
    notifier.ready()
    notifier.starting(1.5)
    notifier.alive()
    notifier.status("a camera:\nrunning")
    notifier.stopping()
    assert manager.heard() == ["READY=1", "EXTEND_TIMEOUT_USEC=1500000", "WATCHDOG=1", "STATUS=a camera: running", "STOPPING=1"]


def run(manager, *arguments, code=None):
    command = [sys.executable, *(["-c", code] if code else ["-m", "edgevlm"]), "run", "--threads", "1", *map(str, arguments)]
    ready = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a job in the background has it ignored
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env={**os.environ, **manager.environment}, **silent, **ready)


def test_a_run_from_its_start_to_its_end(manager):
    process = run(manager, "--realtime", "--frames", "9")
    assert process.wait(120) == 0
    said = manager.heard()
    signs = [message for message in said if not message.startswith("STATUS=")]
    ready = signs.index("READY=1")
    assert set(signs[:ready]) <= {"EXTEND_TIMEOUT_USEC=120000000"}
    assert len(signs[ready + 1 : -1]) >= 2
    assert set(signs[ready + 1 : -1]) == {"WATCHDOG=1"}
    assert said[-1] == "STOPPING=1"
    assert any(message.startswith("STATUS=demo: running, ") for message in said)


def test_a_camera_that_dies_is_lived_through(manager, tmp_path):
    (tmp_path / "pictures").mkdir()
    with mjpeg_camera(tmp_path / "pictures") as camera:
        timeouts = ("--open-timeout", "60", "--stall-timeout", "0.5", "--read-timeout", "1")
        process = run(manager, "--camera", f"http://127.0.0.1:{camera.port}/live", "--fps", "10", *timeouts)
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


def test_a_model_that_hangs_is_heard_no_more(manager):
    process = run(manager, "--realtime", "--frames", "50", code=HUNG_MODEL)
    try:
        manager.until("READY=1")
        for _ in range(2):  # a sign of life may be a tick behind
            manager.until("STATUS=demo: running, 4 frames")
        assert {manager.hears().split(",")[0] for _ in range(3)} == {"STATUS=demo: running"}
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(manager, folder, code=None):
    pytest.importorskip("fastapi")
    command = [sys.executable, *(["-c", code] if code else ["-m", "edgevlm"]), "serve", "--port", "0", "--state", str(folder)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **manager.environment}, **silent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_server_whose_model_hangs_is_heard_no_more(manager, tmp_path):
    with serving(manager, tmp_path, HUNG_MODEL):
        manager.until("READY=1")
        for _ in range(3):  # the run's own signs are up to a second behind
            manager.until("STATUS=1 streams, 4 frames")
        assert {manager.hears() for _ in range(3)} == {"STATUS=1 streams, 4 frames"}

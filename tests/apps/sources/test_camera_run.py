"""`edgevlm run` on a network camera, as a process: it outlives the camera, says what happens, and tells nobody the password."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import mjpeg_camera
from typed import edgevlm

TIMEOUTS = ("--stats-every", "0.2", "--open-timeout", "60", "--stall-timeout", "0.5", "--read-timeout", "1.5")


class Command:
    """`edgevlm run --json` on an address; its events as they come."""

    def __init__(self, url, *more):
        command = [sys.executable, "-m", "edgevlm", "run", "--camera", url, "--json", "--threads", "1", *TIMEOUTS, *more]
        ready = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a job in the background has it ignored
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **ready)
        self.lines, self.said = [], []
        streams = (self.process.stdout, self.lines), (self.process.stderr, self.said)
        self.readers = [threading.Thread(target=into.extend, args=(stream,), daemon=True) for stream, into in streams]
        for reader in self.readers:
            reader.start()

    def reach(self, condition, what):
        """The first stats, from now on, that a condition holds for."""
        seen, deadline = len(self.lines), time.monotonic() + 120
        while time.monotonic() < deadline:
            for line in self.lines[seen:]:
                if condition(json.loads(line)):
                    return json.loads(line)
            time.sleep(0.05)
        raise AssertionError(f"{what}: {self.lines[-1:]} {self.said}")

    def end(self):
        """Ctrl-C; returns the summary."""
        self.process.send_signal(2)
        assert self.process.wait(120) == 0
        for reader in self.readers:
            reader.join()
        return json.loads(self.lines[-1])


def title(process):
    return " ".join(psutil.Process(process.pid).cmdline()) + Path(f"/proc/{process.pid}/comm").read_text()


def running(stats):
    return stats["source_state"] == "running" and stats["frames"] > 0


def test_a_run_outlives_its_camera_and_keeps_the_password(tmp_path):
    with mjpeg_camera(tmp_path) as camera:
        camera.tell("password s3cret")
        run = Command(f"http://u:s3cret@127.0.0.1:{camera.port}/live?token=t0ken", "--fps", "10")
        before = run.reach(running, "it runs")
        assert "s3cret" not in title(run.process)
        assert "t0ken" not in title(run.process)
        camera.freeze()
        run.reach(lambda stats: stats["source_state"] == "stalled", "a frozen camera stalls")
        down = run.reach(lambda stats: stats["source_state"] == "reconnecting", "and is given up")
        assert down["source_problem"]
        camera.thaw()
        camera.kill()
        camera.start()
        camera.tell("password changed")
        refused = run.reach(lambda stats: "401" in (stats["source_problem"] or ""), "another password is no reason to end")
        assert refused["frames"] >= before["frames"]
        assert refused["cache_tokens"] >= before["cache_tokens"], "what was seen is still held"
        camera.tell("password s3cret")
        after = run.reach(lambda stats: running(stats) and stats["frames"] > refused["frames"], "it goes on")
        assert after["reconnects"] >= 1
        summary = run.end()
    assert summary["frames"] >= after["frames"]
    assert summary["dropped"] == sum(summary["drops"].values())
    said = "".join(run.said)
    name = f"http://***@127.0.0.1:{camera.port}/live?token=***"
    for words in (": stalled (no frame for 0.5 s)", ": reconnecting (", ": running again after "):
        assert name + words in said
    for secret in ("s3cret", "t0ken", "Traceback"):
        assert secret not in said + "".join(run.lines)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://u:wr0ng@127.0.0.1:{port}/live", "wrong or missing user name and password (401)"),
        ("http://127.0.0.1:{port}/live", "wrong or missing user name and password (401)"),
        (
            "http://u:wr0ng@127.0.0.1:9/live",
            "127.0.0.1:9 refused the connection; check the port, and that the camera is on; add --wait to keep trying",
        ),
        (
            "rtsp://u:wr0ng@127.0.0.1:9/live",
            "127.0.0.1:9 refused the connection; check the port, and that the camera is on; add --wait to keep trying",
        ),
        ("http://u:wr0ng/x@127.0.0.1:9/live", "percent-encode / # ? in the password, or give username and password"),
        ("nowhere://u:wr0ng@127.0.0.1:9/live", "nowhere:// is not supported"),
    ],
)
def test_what_cannot_be_opened_is_one_line(tmp_path, address, says):
    with mjpeg_camera(tmp_path) as camera:
        camera.tell("password right")
        done = edgevlm("run", "--camera", address.format(port=camera.port), "--json", *TIMEOUTS)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert "wr0ng" not in done.stderr

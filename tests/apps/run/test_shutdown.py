"""A run that is told to end does so soon, its summary said and its snapshot written, wherever it stands."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pexpect
import pytest
from cameras import MjpegCamera
from typed import start

from edgevlm.runtime.snapshots.directory import verified
from edgevlm.runtime.snapshots.format import Snapshot

COUNT = "how many objects are there now?"
SLOW_ANSWER = """
import sys, time
from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeDecoder
step = OnnxRuntimeDecoder.step
def slowly(self, *arguments, **settings):
    rows = arguments[4] if len(arguments) > 4 else settings.get("logit_rows", ())
    if len(rows):
        print("generating", file=sys.stderr, flush=True)
        time.sleep(1)
        result = step(self, *arguments, **settings)
        result.logits[...] = 0
        result.logits[..., 8] = 1  # never the end of a text
        return result
    return step(self, *arguments, **settings)
OnnxRuntimeDecoder.step = slowly
from edgevlm.__main__ import main
main()
"""


def ends(process):
    """Wait for the end of a process: its exit code and all that it said."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Traceback" not in err, err
    return process.returncode, out, err


def kept(folder):
    return [found.about["session"]["frames"] for _, found in verified(folder) if isinstance(found, Snapshot)]


def clean(process, folder, summary=True):
    code, out, err = ends(process)
    assert code == 0, err
    assert kept(folder), err
    if summary:
        assert json.loads(out.splitlines()[-1])["event"] == "summary"
    return json.loads(out.splitlines()[-1]) if summary else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_writes_the_summary_and_the_snapshot(tmp_path, number):
    process = start("run", "--realtime", "--json", "--state", tmp_path)
    process.stdout.readline()
    process.send_signal(number)
    summary = clean(process, tmp_path)
    assert kept(tmp_path) == [summary["frames"]]


def test_in_the_midst_of_an_answer(tmp_path):
    """An answer of 88 tokens of a second each is cancelled, and leaves nothing in the snapshot."""
    process = start(
        "run", "--no-realtime", "--frames", 20, "--json", "--state", tmp_path, "--ask-at", f"5:{COUNT}", code=SLOW_ANSWER
    )
    for line in process.stderr:
        if "generating" in line:
            break
    process.send_signal(signal.SIGTERM)
    clean(process, tmp_path)
    assert kept(tmp_path) == [10]


def test_while_the_source_blocks_in_a_read(tmp_path):
    """A camera that sends a few pictures and then nothing, its connection open."""
    with MjpegCamera(frames=100, hangs=True) as camera:
        process = start("run", "--camera", camera.url, "--fps", 30, "--json", "--state", tmp_path)
        for line in process.stdout:
            if json.loads(line)["frames"]:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        summary = clean(process, tmp_path)
    assert kept(tmp_path) == [summary["frames"]]


@pytest.mark.parametrize("output", [["--json"], []])
def test_a_reader_that_goes_away(tmp_path, output):
    process = start("run", "--realtime", *output, "--state", tmp_path, "--state-every", "0.2")
    while not kept(tmp_path):
        assert process.poll() is None
        time.sleep(0.05)
    process.stdout.close()
    process.stdout = None
    clean(process, tmp_path, summary=False)


def test_a_terminal_that_goes_away(tmp_path):
    terminal = {"dimensions": (40, 120), "env": os.environ | {"TERM": "xterm-256color"}, "encoding": "utf-8"}
    child = pexpect.spawn(sys.executable, ["-m", "edgevlm", "run", "--state", str(tmp_path)], timeout=120, **terminal)
    child.expect("holds")
    os.close(child.child_fd)
    deadline = time.monotonic() + 120
    while child.isalive() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.terminate(force=True)
    assert child.exitstatus == 0
    assert kept(tmp_path)


def test_a_second_signal_does_not_wait(tmp_path):
    """The first one waits for a frame that takes for ever."""
    slow = SLOW_ANSWER.replace("if len(rows):", "if len(rows) or len(arguments[0]) > 40:").replace("sleep(1)", "sleep(60)")
    process = start("run", "--realtime", "--json", "--chunk", 8, "--state", tmp_path, code=slow)
    for line in process.stderr:
        if "generating" in line:
            break
    for wait_s in (1, 30, 60):  # two that come before the first is seen are one
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    assert ends(process)[0] == 130
    assert kept(tmp_path) == [], "no snapshot of half a frame"

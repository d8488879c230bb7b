"""The demo at a real pseudo-terminal, at several sizes; questions and commands that come on a pipe."""

import json
import os
import re
import subprocess
import sys
import time

import pexpect
import pyte
import pytest

COUNT = "how many objects are there now?"


class Terminal:
    """A run of edgevlm at a pseudo-terminal; ``text`` is what its screen shows."""

    def __init__(self, tmp_path, *arguments, then="exit $?", columns=120, rows=30, **environment):
        self.screen = pyte.Screen(columns, rows)
        self.screen.write_process_input = lambda data: self.process.send(data)  # the cursor's place, which is asked for
        self.stream = pyte.Stream(self.screen)
        self.printed = ""
        known = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
        command = f"set -m; {sys.executable} -m edgevlm run {' '.join(arguments)}; {then}"
        self.process = pexpect.spawn(
            "bash", ["--norc", "-c", command], env={**os.environ, **known, **environment},
            dimensions=(rows, columns), encoding="utf-8", codec_errors="replace", timeout=5,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.close(force=True)

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, pattern, seconds=180):
        """Read until the screen shows ``pattern``, and return it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"no {pattern!r} in\n{self.text}"
            self.read(0.2)
        return found

    def read(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                block = self.process.read_nonblocking(65536, timeout=left)
            except pexpect.TIMEOUT:
                return
            except pexpect.EOF:
                return
            self.printed += block
            self.stream.feed(block)

    def until_loading(self):
        while not re.search("starting|the model", self.printed):  # a quick machine wipes it soon
            assert self.process.isalive(), self.printed
            self.read(0.05)

    def type(self, keys):
        self.process.send(keys)

    def resize(self, columns, rows):
        self.process.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def ends(self):
        self.process.expect(pexpect.EOF, timeout=120)
        self.process.close()
        return self.process.exitstatus


def test_the_demo_compares_three_memories_and_answers_from_each(tmp_path):
    with Terminal(tmp_path, COLORTERM="truecolor") as terminal:
        first = terminal.until(r"(?s)^This camera .*ask\s+it\s+what\s+it\s+saw")
        assert first, "the first line is about who reads it"
        terminal.until(r"(?s)full KV.*holds.*auto: last-seen.*sliding window.*knows \d of [1-9]")
        terminal.until("▀{28}")
        cells = [cell for row in terminal.screen.buffer.values() for cell in row.values() if cell.data == "▀"]
        assert len({(cell.fg, cell.bg) for cell in cells}) > 50, "the picture has colours"
        terminal.type(f"{COUNT}\r")
        terminal.until(rf"\] {re.escape(COUNT)}  \d  truth: \d")
        terminal.type("/policy\r")
        terminal.until(r"policy last-seen, \d+ of 512 tokens a layer")
        terminal.type("/hepl\r")
        terminal.until(r"unknown command /hepl; did you mean '/help'\?")
        terminal.type("\x1b[A\x1b[A\x1b[A")
        terminal.until(rf"ask> {re.escape(COUNT)}")
        terminal.type("\x15wher\t")
        terminal.until(r"where (is|was) the \w+ \w+( now)?\?")
        terminal.type("\x1b\x15/quit\r")
        assert terminal.ends() == 0


def test_what_is_typed_while_the_model_loads_is_answered(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.until_loading()
        terminal.type(f"/policy\r{COUNT}\rhow ma")
        terminal.until(r"policy last-seen, \d+ of 512 tokens a layer")
        terminal.until("ask> how ma")
        terminal.until(rf"{re.escape(COUNT)}  \d  truth: \d")
        terminal.type("\x15/quit\r")
        assert terminal.ends() == 0


def test_resize_suspend_and_ctrl_c(tmp_path):
    with Terminal(tmp_path, columns=80, rows=24, then="echo stopped; sleep 1; fg; exit $?") as terminal:
        terminal.until(r"full KV .*(knows|asked)")
        terminal.until(r"sliding window .*\n.*  holds")
        for columns, rows in ((40, 12), (120, 12), (80, 24)):
            terminal.resize(columns, rows)
            terminal.until(r"full KV .*(knows|asked)")
            terminal.until(r"(?m)^ask> ")
            terminal.read(1)
            terminal.until(r"(?s)^(?!.*ask> .*ask> ).*ask> ")  # nothing is left behind
        terminal.type("\x1a")
        terminal.until(r"(?m)^stopped")
        terminal.until("ask> ")
        terminal.type("\x03")
        terminal.until(r"ended · \d+ frames")
        assert terminal.ends() == 0


def test_no_colour_means_none(tmp_path):
    with Terminal(tmp_path, columns=90, rows=24, NO_COLOR="1") as terminal:
        terminal.until(r"full KV .*(knows|asked)")
        terminal.until("[█░·]")
        cells = [cell for row in terminal.screen.buffer.values() for cell in row.values()]
        assert {cell.fg for cell in cells} | {cell.bg for cell in cells} == {"default"}
        terminal.until("knows . of [1-9]")
        terminal.type("\x04")
        terminal.until(r"ended · \d+ frames in \d")
        terminal.until(r"(?s)still known: full KV \d of .*Next: edgevlm run --camera 0")
        assert terminal.ends() == 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_terminal_that_cannot_be_drawn_on_takes_lines(tmp_path, environment):
    with Terminal(tmp_path, **environment) as terminal:
        terminal.until("replace the demo's own")
        terminal.type(f"{COUNT}\r")
        terminal.until(rf"\[[\d:]+\] {re.escape(COUNT)}  \d   \(truth: \d\)")
        assert "\x1b" not in terminal.text
        terminal.type("\x04")
        assert terminal.ends() == 0


def piped(lines, *arguments):
    command = [sys.executable, "-m", "edgevlm", "run", "--threads", "1", "--quiet", *map(str, arguments)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=True)


def test_questions_of_a_recording_are_answered_at_its_end():
    done = piped(f"{COUNT}\n\n/policy\n/nothing\n{COUNT}", "--frames", 20)
    assert done.stdout.count(f"[10.0 s] {COUNT}") == 2
    assert "tokens a layer" in done.stderr
    assert "unknown command /nothing" in done.stderr


def test_questions_of_a_live_source_are_answered_when_they_come():
    done = piped(f"{COUNT}\n", "--realtime", "--frames", 6, "--json")
    (answer,) = [line for line in map(json.loads, done.stdout.splitlines()) if line["event"] == "answer"]
    assert answer["question"] == COUNT
    assert answer["time_s"] < 3.0, "before its end"

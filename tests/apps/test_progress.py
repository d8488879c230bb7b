"""Progress on a real terminal: lines printed meanwhile stay above it, and nothing of it is left."""

import os
import sys

import pexpect
import pyte

ROWS, COLUMNS = 24, 50
WRITES = """
import sys, time
from edgevlm.progress import progress
with progress("loading") as step:
    for number in range(3):
        step("measuring", number, 3)
        time.sleep(0.2)
        print(f"data {number} " + "x" * 60, flush=True)
        print("[red]note", file=sys.stderr)
        with progress("an inner step"):
            time.sleep(0.2)
        print("kept [bold]", file=sys.stderr)
"""


def test_what_is_printed_stays_and_the_line_does_not():
    screen = pyte.Screen(COLUMNS, ROWS)
    terminal = {"dimensions": (ROWS, COLUMNS), "env": os.environ | {"TERM": "xterm-256color"}, "encoding": "utf-8"}
    child = pexpect.spawn(sys.executable, ["-c", WRITES], timeout=120, **terminal)
    child.expect(pexpect.EOF)
    child.close()
    pyte.Stream(screen).feed(child.before)
    assert child.exitstatus == 0
    assert "measuring 2/3" in child.before
    assert not screen.cursor.hidden
    wrapped = "x" * (60 - COLUMNS + len("data 0 "))
    wanted = [[f"data {number} " + "x" * (COLUMNS - 7), wrapped, "[red]note", "kept [bold]"] for number in range(3)]
    assert [line.rstrip() for line in screen.display if line.strip()] == [line for part in wanted for line in part]

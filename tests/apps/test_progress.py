"""Progress on a real terminal: lines printed meanwhile stand above it, and nothing of it is left."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios

import pyte

ROWS, COLUMNS = 24, 50


def on_a_terminal(code, interrupt_at=None, term="xterm-256color"):
    """The screen's lines after ``code`` has run, those when ctrl-C was typed, and the exit status."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = term
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background has it ignored
        signal.alarm(120)  # a child that ctrl-C does not end fails the test, and does not hang it
        os.execv(sys.executable, [sys.executable, "-c", code])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    before, typed = [], False
    while True:
        if not typed and interrupt_at is not None and any(interrupt_at in line for line in screen.display):
            before, typed = lines(screen), True
            os.write(terminal, b"\x03")
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                stream.feed(os.read(terminal, 65536))
            except OSError:
                break
    _, status = os.waitpid(pid, 0)
    assert not screen.cursor.hidden
    return lines(screen), before, os.waitstatus_to_exitcode(status)


def lines(screen):
    return [line.rstrip() for line in screen.display if line.strip()]


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
    shown, _, status = on_a_terminal(WRITES)
    wrapped = "x" * (60 - COLUMNS + len("data 0 "))
    wanted = [[f"data {number} " + "x" * (COLUMNS - 7), wrapped, "[red]note", "kept [bold]"] for number in range(3)]
    assert status == 0
    assert shown == [line for part in wanted for line in part]

"""``edgevlm`` as it is typed, in this process, which spares each test an interpreter and its imports, or in one of its own."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

from edgevlm.cli import main


def edgevlm(*arguments, **environment):
    """``returncode``, ``stdout`` and ``stderr`` of ``edgevlm ARGUMENTS``; nothing is on stdin."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with (
            patch.object(sys, "argv", ["edgevlm", *map(str, arguments)]),
            patch.dict(os.environ, environment),
            open(os.devnull) as nothing,
            patch.object(sys, "stdin", nothing),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def events(*arguments, **environment):
    """The JSON lines of a command that succeeds."""
    done = edgevlm(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def of_kind(lines, *kinds):
    """The events of these kinds."""
    return [line for line in lines if line["event"] in kinds]


def refused(*arguments, **environment):
    """The one line of a command that refuses what it was given, printing nothing else."""
    done = edgevlm(*arguments, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("edgevlm: ")
    return done.stderr


def start(*arguments, code="from edgevlm.__main__ import main\nmain()", **options):
    """A process of ``edgevlm ARGUMENTS``, its output on pipes. code: what it runs instead."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **streams | options)

"""A measurement in a process of its own, so that its memory is its own: the work as JSON on stdin, lines of JSON on stdout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from edgevlm.errors import UserError


@contextmanager
def child(command: Sequence[str], work: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that is given its work; waited for at the end, killed where that is an exception."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(work))
            process.stdin.close()
            yield process
        except BaseException:
            process.kill()
            raise


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What it says, as it does. Raises UserError for an ``error``: what the user did wrong."""
    assert process.stdout is not None
    for text in process.stdout:
        line = json.loads(text)
        if "error" in line:
            raise UserError(line["error"])
        yield line

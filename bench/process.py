"""A measurement in a process of its own, so that its memory is its own: work as JSON on stdin, JSON lines on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from edgevlm.errors import UserError


class ProcessError(RuntimeError):
    """A measuring process ended with ``code``, -9 where the system killed it because memory was short."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the measuring process ended with code {code}")
        self.code = code


def run_module(module: str, work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run ``python -m module`` and yield its lines; the process ends with the iterator.

    Raises UserError for a line ``{"error": ...}`` and ProcessError where the process fails.
    """
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(work))
            process.stdin.close()
            for text in process.stdout:
                line = json.loads(text)
                if "error" in line:
                    raise UserError(line["error"])
                yield line
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ProcessError(process.returncode)


def serve(measure: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> None:
    """The other end of :func:`run_module`: measure the work on stdin and print a line each."""
    try:
        for line in measure(json.load(sys.stdin)):
            print(json.dumps(line), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)

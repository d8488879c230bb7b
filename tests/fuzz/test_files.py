"""A few cases of each target of ``files.py``; the command makes thousands."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("target", "cases"), [("manifests", 8), ("contents", 6), ("templates", 12), ("snapshots", 6)])
def test_no_file_ends_in_a_traceback(target: str, cases: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("files.py")), target, str(cases), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

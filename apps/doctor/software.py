"""Python and its packages, processor, memory and disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

from edgevlm.apps.bundles.cache import cache_folder
from edgevlm.apps.doctor.jetson import release_of
from edgevlm.engines.devices.machine import Finding, Machine

OLDEST = (3, 10)
OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
KERNELS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))  # flag in /proc/cpuinfo, best first
LITTLE, SCARCE = 500_000, 2_000_000  # kB available
FULL, NARROW = 0.2e9, 2e9  # bytes free


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
        fix = f"pip uninstall -y {gone} && pip install {kept}"
        yield Finding("onnxruntime", "fail", f"{said} are installed over each other: a GPU may silently not be used", fix)
    else:
        yield Finding("onnxruntime", "ok", said)


def opencv(machine: Machine) -> Iterator[Finding]:
    """OpenCV: one build of it, or the platform's own."""
    found = {name: version for name, version in machine.packages().items() if name in OPENCV}
    said = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    if len(found) > 1:
        fix = f"pip uninstall -y {' '.join(sorted(found))} && pip install opencv-python-headless"
        yield Finding("opencv", "warn", f"{said} are installed over each other", fix)
    elif found:
        yield Finding("opencv", "ok", said)
    else:
        yield Finding("opencv", "warn", "no wheel found: cameras and videos need it", "pip install opencv-python-headless")


def cpu(machine: Machine) -> Iterator[Finding]:
    """What the cache's kernels can use of the processor."""
    fields = machine.fields("proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or fields.get("Model") or fields.get("CPU part") or "of an unknown name"
    if not flags:
        yield Finding("cpu", "warn", "/proc/cpuinfo says no features: not found")
        return
    best = next((said for flag, said in KERNELS if flag in flags), None)
    if best is None:
        yield Finding(
            "cpu", "warn", f"{name} has neither AVX2 nor NEON: the cache's kernels are plain C++", "run it on a newer one"
        )
        return
    yield Finding("cpu", "ok", f"{name}, {best}")


def memory(machine: Machine) -> Iterator[Finding]:
    """Memory that a run could take."""
    kilobytes = {name: text.split()[0] for name, text in machine.fields("proc/meminfo").items() if text}
    total, free = (kilobytes.get(name, "") for name in ("MemTotal", "MemAvailable"))
    if not (total.isdigit() and free.isdigit()):
        yield Finding("memory", "warn", "/proc/meminfo does not say: not found")
        return
    said = f"{int(free) / 1e6:.1f} of {int(total) / 1e6:.1f} GB available"
    if int(free) < LITTLE:
        yield Finding("memory", "fail", said, "end other programs, or the desktop: sudo systemctl isolate multi-user.target")
    elif int(free) < SCARCE:
        yield Finding("memory", "warn", said, "enough for the demo; edgevlm plan says what a model takes")
    else:
        yield Finding("memory", "ok", said)


def disk(machine: Machine) -> Iterator[Finding]:
    """Room where bundles are kept, and whether they may be written there."""
    folder = cache_folder().absolute()
    place = machine.path(str(folder.relative_to(folder.anchor)))
    there = next((parent for parent in (place, *place.parents) if parent.exists()), machine.root)
    elsewhere = "name another folder in EDGEVLM_CACHE"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding("disk", "warn", f"{folder}: bundles cannot be written there", f"take ownership of it, or {elsewhere}")
        return
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        yield Finding("disk", "warn", f"{folder}: cannot be asked ({error.strerror})")
        return
    said = f"{free / 1e9:.1f} GB free for bundles in {folder}"
    if free < FULL:
        yield Finding("disk", "fail", said, f"make room, or mount an NVMe disk and {elsewhere}")
    elif free < NARROW:
        yield Finding("disk", "warn", said, f"a bundle takes up to 4 bytes a parameter of its model; make room, or {elsewhere}")
    else:
        yield Finding("disk", "ok", said)

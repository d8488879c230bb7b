"""Processor, memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from edgevlm.apps.bundles.cache import cache_folder
from edgevlm.engines.devices.machine import Finding, Machine

KERNELS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))  # flag in /proc/cpuinfo, best first
LITTLE, SCARCE = 500_000, 2_000_000  # kB available
FULL, NARROW = 0.2e9, 2e9  # bytes free


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

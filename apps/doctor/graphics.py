"""The GPU: whether there is one, with a driver, whether it may be opened, and whether ONNX Runtime would use it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Literal

from edgevlm.apps.doctor.jetson import is_jetson
from edgevlm.engines.devices.machine import Finding, Machine
from edgevlm.runtime.engine import DEFAULT_ENGINE

ON_CPU = {"onnxruntime-cpu"}  # engines that need no GPU
NVIDIA = "0x10de"  # its PCI vendor
NODES = ("dev/nvidia0", "dev/nvhost-ctrl-gpu", "dev/nvmap", "dev/nvgpu/igpu0/ctrl")
ASK = "import onnxruntime; print(*onnxruntime.get_available_providers())"
FASTER = ("CUDAExecutionProvider", "TensorrtExecutionProvider")


def has_gpu(machine: Machine) -> bool:
    """Whether an NVIDIA GPU can be seen."""
    return is_jetson(machine) or machine.read("proc/driver/nvidia/version") is not None or _on_pci(machine)


def _on_pci(machine: Machine) -> bool:
    found = machine.path("sys/bus/pci/devices").glob("*/vendor")
    return any(machine.read(str(vendor.relative_to(machine.root))) == NVIDIA for vendor in found)


def gpu(machine: Machine) -> Iterator[Finding]:
    """The GPU and its driver."""
    version = machine.read("proc/driver/nvidia/version")
    nodes = [node for node in NODES if machine.path(node).exists()]
    if version is not None:
        number = re.search(r"Kernel Module[^\d]*([\d.]+)", version)
        yield Finding("gpu", "ok", f"NVIDIA's driver {number[1] if number else 'of an unknown version'}")
    elif is_jetson(machine) and nodes:
        yield Finding("gpu", "ok", f"the Jetson's own ({', '.join('/' + node for node in nodes)})")
    elif is_jetson(machine):
        mend = "a container needs --runtime nvidia; else reinstall nvidia-l4t-core"
        yield Finding("gpu", "warn", "the Jetson's GPU has no node under /dev: not found", mend)
    elif _on_pci(machine):
        yield Finding("gpu", "warn", "an NVIDIA GPU without a driver", "install NVIDIA's driver, or go on with the CPU")
    else:
        yield Finding("gpu", "ok", "no NVIDIA GPU found: models run on the CPU")


def in_use(machine: Machine) -> Iterator[Finding]:
    """Whether ONNX Runtime here could use the GPU, asked in a process of its own, and whether an engine of edgevlm does."""
    if not has_gpu(machine):
        return
    said = machine.run([sys.executable, "-c", ASK])
    if said is None:
        yield Finding("gpu in use", "warn", "ONNX Runtime gave no answer", f"see what fails: {sys.executable} -c '{ASK}'")
        return
    providers = [name for name in said.split() if name in FASTER]
    if not providers:
        mend = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu (on a Jetson its JetPack's wheel)"
        yield Finding("gpu in use", "warn", f"no: ONNX Runtime has only {said.strip() or 'nothing'}", mend)
    else:
        yield Finding(
            "gpu in use",
            "ok",
            f"ONNX Runtime was built with {', '.join(providers)}: run --engine onnxruntime-cuda tells whether they start",
        )


def permissions(machine: Machine) -> Iterator[Finding]:
    """Whether this user may open the GPU's nodes; that stops a run only where the engine of runs needs them."""
    found = [machine.path(node) for node in NODES if machine.path(node).exists()]
    found += sorted(machine.path("dev/dri").glob("renderD*"))
    closed = [str(path.relative_to(machine.root)) for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        mend = "sudo usermod -aG video,render $USER, and log in again"
        status: Literal["fail", "warn"] = "fail" if DEFAULT_ENGINE not in ON_CPU else "warn"
        yield Finding("permissions", status, f"/{', /'.join(closed)} may not be opened", mend)
    elif found:
        yield Finding("permissions", "ok", f"{len(found)} device nodes may be opened")

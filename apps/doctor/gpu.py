"""NVIDIA GPUs: driver, permissions, and what engines on one load: ONNX Runtime, cuDNN, CUDA and their wheels."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from edgevlm.engines.devices.jetson import is_jetson, toolkit_of
from edgevlm.engines.devices.machine import Machine, Outcome, Status
from edgevlm.packages import install
from edgevlm.runtime.engine import DEFAULT_ENGINE

ON_CPU = {"onnxruntime-cpu"}  # engines that need no GPU
NVIDIA = "0x10de"  # its PCI vendor
NODES = ("dev/nvidia0", "dev/nvhost-ctrl-gpu", "dev/nvmap", "dev/nvgpu/igpu0/ctrl")
ASK = "import onnxruntime; print(*onnxruntime.get_available_providers())"
FASTER = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
CUDNN = "9"  # its major version, of every onnxruntime-gpu from 1.19 on; 8 and 9 do not take each other's place
FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/cuda/lib64", "usr/local/lib")
INSTALL_CUDNN = "install NVIDIA's cudnn9-cuda-12, or cudnn9-cuda-13 for an ONNX Runtime of CUDA 13"


def has_gpu(machine: Machine) -> bool:
    """Whether an NVIDIA GPU can be seen."""
    return is_jetson(machine) or machine.read("proc/driver/nvidia/version") is not None or _on_pci(machine)


def _on_pci(machine: Machine) -> bool:
    found = machine.path("sys/bus/pci/devices").glob("*/vendor")
    return any(machine.read(str(vendor.relative_to(machine.root))) == NVIDIA for vendor in found)


def gpu(machine: Machine) -> Iterator[Outcome]:
    """The GPU and its driver."""
    version = machine.read("proc/driver/nvidia/version")
    nodes = [node for node in NODES if machine.path(node).exists()]
    if version is not None:
        number = re.search(r"Kernel Module[^\d]*([\d.]+)", version)
        yield "ok", f"NVIDIA's driver {number[1] if number else 'of an unknown version'}"
    elif is_jetson(machine) and nodes:
        yield "ok", f"the Jetson's own ({', '.join('/' + node for node in nodes)})"
    elif is_jetson(machine):
        fix = "a container needs --runtime nvidia; else reinstall nvidia-l4t-core"
        yield "warn", "the Jetson's GPU has no node under /dev: not found", fix
    elif _on_pci(machine):
        yield "warn", "an NVIDIA GPU without a driver", "install NVIDIA's driver, or go on with the CPU"
    else:
        yield "ok", "no NVIDIA GPU found: models run on the CPU"


def in_use(machine: Machine) -> Iterator[Outcome]:
    """Whether ONNX Runtime here could use the GPU, asked in a process of its own, and whether an engine of edgevlm does."""
    if not has_gpu(machine):
        return
    text = machine.run([sys.executable, "-c", ASK])
    if text is None:
        yield "warn", "ONNX Runtime gave no answer", f"see what fails: {sys.executable} -c '{ASK}'"
        return
    providers = [name for name in text.split() if name in FASTER]
    if not providers:
        fix = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu (on a Jetson its JetPack's wheel)"
        yield "warn", f"no: ONNX Runtime has only {text.strip() or 'nothing'}", fix
    else:
        yield (
            "ok",
            f"ONNX Runtime was built with {', '.join(providers)}: run --engine onnxruntime-cuda tells whether they start",
        )


def permissions(machine: Machine) -> Iterator[Outcome]:
    """Whether this user may open the GPU's nodes; that stops a run only where the engine of runs needs them."""
    found = [machine.path(node) for node in NODES if machine.path(node).exists()]
    found += sorted(machine.path("dev/dri").glob("renderD*"))
    closed = [str(path.relative_to(machine.root)) for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        fix = "sudo usermod -aG video,render $USER, and log in again"
        status: Status = "fail" if DEFAULT_ENGINE not in ON_CPU else "warn"
        yield status, f"/{', /'.join(closed)} may not be opened", fix
    elif found:
        yield "ok", f"{len(found)} device nodes may be opened"


def cudnn(machine: Machine) -> Iterator[Outcome]:
    """cuDNN, which ONNX Runtime loads on a GPU: of the system's packages, of a wheel, or a library where loaders look."""
    if not has_gpu(machine):
        return
    found = _debs(machine, r"libcudnn\d+(?:-cuda-\d+)?") | _wheels(machine, r"nvidia-cudnn(?:-cu\d+)?") | _libraries(machine)
    text = ", ".join(f"{version} ({where})" for where, version in sorted(found.items()))
    fix = "sudo apt install nvidia-jetpack" if is_jetson(machine) else INSTALL_CUDNN
    if not found:
        yield "warn", "not found: ONNX Runtime falls back to the CPU without it", fix
    elif not any(version.split(".")[0] == CUDNN for version in found.values()):
        yield "warn", f"{text}, and ONNX Runtime loads cuDNN {CUDNN}", fix
    else:
        yield "ok", text


def runtime(machine: Machine) -> Iterator[Outcome]:
    """CUDA's runtime libraries on a GPU that is no Jetson's, whose CUDA has a check of its own."""
    if not has_gpu(machine) or is_jetson(machine):
        return
    found = _debs(machine, r"cuda-cudart-\d+-\d+") | _wheels(machine, r"nvidia-cuda-runtime(?:-cu\d+)?")
    if toolkit := toolkit_of(machine):
        found["/usr/local/cuda"] = toolkit
    if found:
        text = ", ".join(f"{version} ({where})" for where, version in sorted(found.items()))
        yield "ok", text
    else:
        yield "warn", "CUDA's libraries: not found", "install NVIDIA's cuda-toolkit"


def wheels(machine: Machine) -> Iterator[Outcome]:
    """The packages that engines on a GPU, and the meter of its power, import."""
    if not has_gpu(machine):
        return
    packages = machine.packages()
    wanted = ["onnxruntime-gpu"] + ["nvidia-ml-py"] * (not is_jetson(machine))  # a Jetson's power is read from the board
    there = [f"{name} {packages[name]}" for name in wanted if name in packages]
    missing = [name for name in wanted if name not in packages]
    if missing:
        fix = "install the onnxruntime-gpu wheel of its JetPack" if is_jetson(machine) else install("cuda")
        yield "warn", f"not found: {', '.join(missing)}", fix
    else:
        yield "ok", ", ".join(there)


def _debs(machine: Machine, name: str) -> dict[str, str]:
    """Installed packages of dpkg whose whole name matches, and their versions."""
    found = {}
    for about in (machine.read("var/lib/dpkg/status") or "").split("\n\n"):
        package = re.search(rf"^Package: ({name})$", about, re.MULTILINE)
        version = re.search(r"^Version: (?:\d+:)?([\d.]+)", about, re.MULTILINE)
        if package and version and re.search(r"^Status: .* installed$", about, re.MULTILINE):
            found[package[1]] = version[1]
    return found


def _wheels(machine: Machine, name: str) -> dict[str, str]:
    return {package: version for package, version in machine.packages().items() if re.fullmatch(name, package)}


def _libraries(machine: Machine) -> dict[str, str]:
    """cuDNN's libraries, libcudnn.so.9.3.0 and libcudnn.so.9, by their folders; the longest name of a folder says most."""
    found = {}
    for folder in FOLDERS:
        names = (path.name.removeprefix("libcudnn.so.") for path in machine.path(folder).glob("libcudnn.so.*"))
        if versions := [name for name in names if re.fullmatch(r"\d+(\.\d+)*", name)]:
            found[f"/{folder}"] = max(versions, key=len)
    return found

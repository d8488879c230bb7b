"""What engines on an NVIDIA GPU load: cuDNN, CUDA's runtime, and the wheels of ``edgevlm[cuda]``. Elsewhere nothing is said."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgevlm.apps.doctor.graphics import has_gpu
from edgevlm.apps.doctor.jetson import is_jetson, toolkit_of
from edgevlm.engines.devices.machine import Finding, Machine

CUDNN = "9"  # its major version, of every onnxruntime-gpu from 1.19 on; 8 and 9 do not take each other's place
FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/cuda/lib64", "usr/local/lib")
INSTALL_CUDNN = "install NVIDIA's cudnn9-cuda-12, or cudnn9-cuda-13 for an ONNX Runtime of CUDA 13"


def cudnn(machine: Machine) -> Iterator[Finding]:
    """cuDNN, which ONNX Runtime loads on a GPU: of the system's packages, of a wheel, or a library where loaders look."""
    if not has_gpu(machine):
        return
    found = _debs(machine, r"libcudnn\d+(?:-cuda-\d+)?") | _wheels(machine, r"nvidia-cudnn(?:-cu\d+)?") | _libraries(machine)
    said = ", ".join(f"{version} ({where})" for where, version in sorted(found.items()))
    mend = "sudo apt install nvidia-jetpack" if is_jetson(machine) else INSTALL_CUDNN
    if not found:
        yield Finding("cudnn", "warn", "not found: ONNX Runtime falls back to the CPU without it", mend)
    elif not any(version.split(".")[0] == CUDNN for version in found.values()):
        yield Finding("cudnn", "warn", f"{said}, and ONNX Runtime loads cuDNN {CUDNN}", mend)
    else:
        yield Finding("cudnn", "ok", said)


def runtime(machine: Machine) -> Iterator[Finding]:
    """CUDA's runtime libraries on a GPU that is no Jetson's, whose CUDA has a check of its own."""
    if not has_gpu(machine) or is_jetson(machine):
        return
    found = _debs(machine, r"cuda-cudart-\d+-\d+") | _wheels(machine, r"nvidia-cuda-runtime(?:-cu\d+)?")
    if toolkit := toolkit_of(machine):
        found["/usr/local/cuda"] = toolkit
    if found:
        said = ", ".join(f"{version} ({where})" for where, version in sorted(found.items()))
        yield Finding("cuda runtime", "ok", said)
    else:
        yield Finding("cuda runtime", "warn", "CUDA's libraries: not found", "install NVIDIA's cuda-toolkit")


def wheels(machine: Machine) -> Iterator[Finding]:
    """The packages that engines on a GPU, and the meter of its power, import."""
    if not has_gpu(machine):
        return
    packages = machine.packages()
    wanted = ["onnxruntime-gpu"] + ["nvidia-ml-py"] * (not is_jetson(machine))  # a Jetson's power is read from the board
    there = [f"{name} {packages[name]}" for name in wanted if name in packages]
    missing = [name for name in wanted if name not in packages]
    if missing:
        mend = "install the onnxruntime-gpu wheel of its JetPack" if is_jetson(machine) else "pip install 'edgevlm[cuda]'"
        yield Finding("cuda wheels", "warn", f"not found: {', '.join(missing)}", mend)
    else:
        yield Finding("cuda wheels", "ok", ", ".join(there))


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

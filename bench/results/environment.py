"""What numbers depend on besides the command: versions, and the machine with its governor, power mode and clocks."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import psutil

from edgevlm import __version__
from edgevlm.apps.doctor.power import clocks_of, mode_of
from edgevlm.engines.devices.jetson import l4t_of
from edgevlm.engines.devices.machine import Machine

SOURCE = Path(__file__).resolve().parents[2]  # a checkout, where it has .git
PACKAGES = (
    "onnxruntime", "onnxruntime-gpu", "tensorrt", "numpy", "torch", "transformers", "onnx", "llama-cpp-python",
    "openvino", "nncf", "opencv-python", "opencv-python-headless", "av",
)  # fmt: skip
SAME = ("cpu", "cores", "threads", "memory_gb", "device", "gpu", "power_mode")  # of machines whose numbers can be compared


def versions(machine: Machine) -> dict[str, str]:
    """edgevlm, its commit in a checkout (``+``: with uncommitted changes), Python and the installed packages."""
    installed = machine.packages()
    found = {"edgevlm": __version__, "commit": _commit(machine), "python": platform.python_version()}
    found |= {name: installed[name] for name in PACKAGES if name in installed}
    return {name: version for name, version in found.items() if version}


def describe(machine: Machine) -> dict[str, Any]:
    """The machine; None for what cannot be read."""
    cpu = machine.fields("proc/cpuinfo")
    memory = machine.fields("proc/meminfo").get("MemTotal", "").split()
    load = (machine.read("proc/loadavg") or "").split()
    return {
        "cpu": cpu.get("model name") or cpu.get("Model") or cpu.get("CPU part"),
        "arch": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "governor": machine.read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_gb": round(int(memory[0]) / 1e6, 1) if memory and memory[0].isdigit() else None,
        "kernel": machine.read("proc/sys/kernel/osrelease"),
        "gpu": _gpu(machine),
        "driver": _driver(machine),
        "device": machine.read("proc/device-tree/model"),
        "l4t": l4t_of(machine),
        "power_mode": mode_of(machine),
        "clocks_mhz": {name: round(mhz) for name, mhz in clocks_of(machine).items()},
        "load": float(load[0]) if load and re.fullmatch(r"[\d.]+", load[0]) else None,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """What two machines differ in that decides speed; empty for the same machine."""
    if not one or not other:
        return "a file does not say what machine it is from"
    found = [name for name in SAME if one.get(name) != other.get(name)]
    return ", ".join(f"{name}: {one.get(name)} and {other.get(name)}" for name in found)


def _commit(machine: Machine) -> str:
    if not (SOURCE / ".git").exists():
        return ""
    found = (machine.run(["git", "-C", str(SOURCE), "rev-parse", "--short=12", "HEAD"]) or "").strip()
    changed = machine.run(["git", "-C", str(SOURCE), "status", "--porcelain", "--untracked-files=no"])
    return found + "+" if found and changed else found


def _gpu(machine: Machine) -> str | None:
    """The names of NVIDIA's cards, as their driver says them."""
    folder = machine.path("proc/driver/nvidia/gpus")
    cards = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [machine.fields(f"proc/driver/nvidia/gpus/{card.name}/information").get("Model") for card in cards]
    return ", ".join(name for name in names if name) or None


def _driver(machine: Machine) -> str | None:
    found = re.search(r"Kernel Module[^\d]*([\d.]+)", machine.read("proc/driver/nvidia/version") or "")
    return found[1] if found else None

"""Read a Jetson's module, software releases and power modes from its system files."""

from __future__ import annotations

import json
import re
from typing import Any

from edgevlm.engines.devices import DeviceProfile, device_names, load_device
from edgevlm.engines.devices.machine import Machine

GPU_CLOCKS = ("sys/class/devfreq/17000000.gpu", "sys/class/devfreq/17000000.ga10b")  # for JetPack 6 and 7, and for JetPack 5


def is_jetson(machine: Machine) -> bool:
    """Return whether the machine's device tree or release file shows that it is a Jetson."""
    return "tegra" in (machine.read("proc/device-tree/compatible") or "") or machine.read("etc/nv_tegra_release") is not None


def module_of(machine: Machine) -> str | None:
    """Return the module's part number, such as ``p3767-0003``."""
    found = re.findall(r"p3(?:701|767)-\d{4}", machine.read("proc/device-tree/compatible") or "")
    return str(found[-1]) if found else None


def profile_of(machine: Machine) -> DeviceProfile | None:
    """Return the module's device profile. If several profiles fit, choose the one that shares the most power modes with the
    machine.
    """
    module, modes = module_of(machine), set(power_modes(machine).values())
    fitting = [device for device in map(load_device, device_names()) if module in device.modules]
    return max(fitting, key=lambda device: len(modes & {mode["name"] for mode in device["power_modes"]}), default=None)


def l4t_of(machine: Machine) -> str | None:
    """Return Jetson Linux's version, such as ``36.4.3``."""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", machine.read("etc/nv_tegra_release") or "")
    return f"{found[1]}.{found[2]}" if found else None


def release_of(machine: Machine) -> dict[str, Any] | None:
    """Return the device profile's figures for this machine's Jetson Linux release, or None if there are none."""
    version, device = l4t_of(machine), profile_of(machine) or load_device("orin-agx-64")
    if version is None:
        return None
    return next((known for known in device["releases"] if version.split(".")[0] == known["l4t"].split(".")[0]), None)


def power_modes(machine: Machine) -> dict[int, str]:
    """Return the names of the power modes in /etc/nvpmodel.conf, by id."""
    text = machine.read("etc/nvpmodel.conf") or ""
    return {int(number): name for number, name in re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)", text)}


def toolkit_of(machine: Machine) -> str | None:
    """Return the version of the CUDA toolkit in /usr/local/cuda, or None if it is unknown."""
    try:
        found = json.loads(machine.read("usr/local/cuda/version.json") or "{}").get("cuda", {}).get("version")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None

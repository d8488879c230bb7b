"""A Jetson's module, releases, memory for cameras, power mode and clocks. Elsewhere these checks say nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from edgevlm.engines.devices import DeviceProfile, device_names, load_device
from edgevlm.engines.devices.machine import Machine, Outcome

GPU_CLOCKS = ("sys/class/devfreq/17000000.gpu", "sys/class/devfreq/17000000.ga10b")  # of JetPack 6 and 7, and of 5
CMA_KB = 64_000  # free, that a CSI camera's pipeline can be given
SMALL_KB = 9_000_000  # of memory: swap is for building and loading on these


def is_jetson(machine: Machine) -> bool:
    """Whether the device tree, or the release file, says so."""
    return "tegra" in (machine.read("proc/device-tree/compatible") or "") or machine.read("etc/nv_tegra_release") is not None


def module_of(machine: Machine) -> str | None:
    """The module's part number, ``p3767-0003``, of the device tree's ``compatible``."""
    found = re.findall(r"p3(?:701|767)-\d{4}", machine.read("proc/device-tree/compatible") or "")
    return str(found[-1]) if found else None


def profile_of(machine: Machine) -> DeviceProfile | None:
    """The profile of the module; of two, the one whose power modes are those of the machine."""
    module, modes = module_of(machine), set(power_modes(machine).values())
    fitting = [device for device in map(load_device, device_names()) if module in device.modules]
    return max(fitting, key=lambda device: len(modes & {mode["name"] for mode in device["power_modes"]}), default=None)


def l4t_of(machine: Machine) -> str | None:
    """Jetson Linux's version, ``36.4.3``, of ``# R36 (release), REVISION: 4.3, ...``."""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", machine.read("etc/nv_tegra_release") or "")
    return f"{found[1]}.{found[2]}" if found else None


def release_of(machine: Machine) -> dict[str, Any] | None:
    """The versions that belong to its Jetson Linux, of a profile; None for a release that no profile knows."""
    version, device = l4t_of(machine), profile_of(machine) or load_device("orin-agx-64")
    if version is None:
        return None
    return next((known for known in device["releases"] if version.split(".")[0] == known["l4t"].split(".")[0]), None)


def power_modes(machine: Machine) -> dict[int, str]:
    """id -> name, of /etc/nvpmodel.conf."""
    text = machine.read("etc/nvpmodel.conf") or ""
    return {int(number): name for number, name in re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)", text)}


def device(machine: Machine) -> Iterator[Outcome]:
    """Which Jetson it is."""
    if not is_jetson(machine):
        return
    model, module, profile = machine.read("proc/device-tree/model"), module_of(machine), profile_of(machine)
    text = f"{model or 'a Jetson of an unknown name'}, module {module or 'not found'}"
    if profile is None:
        yield "warn", f"{text}: no profile is of it", f"give --device one of {', '.join(device_names())}"
    else:
        yield "ok", f"{text}: --device {profile.name}"


def jetpack(machine: Machine) -> Iterator[Outcome]:
    """Whether its JetPack is one that there are versions for."""
    if not is_jetson(machine):
        return
    version, release = l4t_of(machine), release_of(machine)
    if version is None:
        yield "warn", "/etc/nv_tegra_release: not found", "mount it into the container"
    elif release is None:
        yield "fail", f"Jetson Linux {version}", "flash JetPack 6.2 or newer, which has a newer Python"
    else:
        yield "ok", f"Jetson Linux {version}, of JetPack {release['jetpack'].split('.')[0]}"


def toolkit_of(machine: Machine) -> str | None:
    """The version of CUDA's toolkit in /usr/local/cuda."""
    try:
        found = json.loads(machine.read("usr/local/cuda/version.json") or "{}").get("cuda", {}).get("version")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def cuda(machine: Machine) -> Iterator[Outcome]:
    """CUDA's toolkit, beside the release's."""
    release = release_of(machine)
    if release is None:
        return
    yield _beside(toolkit_of(machine), release["cuda"], "sudo apt install nvidia-jetpack, and /usr/local/cuda/bin in PATH")


def tensorrt(machine: Machine) -> Iterator[Outcome]:
    """TensorRT's runtime library, beside the release's."""
    release = release_of(machine)
    if release is None:
        return
    status = machine.read("var/lib/dpkg/status") or ""
    found = re.search(r"^Package: libnvinfer10\n(?:.+\n)*?Version: ([\d.]+)", status, re.MULTILINE)
    yield _beside(found[1] if found else None, release["tensorrt"], "sudo apt install nvidia-jetpack")


def _beside(found: str | None, wanted: str, fix: str) -> Outcome:
    if found is None:
        return "warn", f"not found; {wanted} belongs to this release", fix
    if found.split(".")[:2] != wanted.split("."):
        return "warn", f"{found}, and {wanted} belongs to this release", fix
    return "ok", found


def cma(machine: Machine) -> Iterator[Outcome]:
    """Contiguous memory, which CSI cameras and the decoders are given."""
    if not is_jetson(machine):
        return
    fields = machine.fields("proc/meminfo")
    sizes = [fields.get(name, "").split(" ")[0] for name in ("CmaFree", "CmaTotal")]
    if not all(size.isdigit() for size in sizes):
        yield "warn", "/proc/meminfo says nothing of CMA: not found"
        return
    free, total = map(int, sizes)
    text = f"{free / 1e3:.0f} of {total / 1e3:.0f} MB contiguous memory free"
    if free < CMA_KB:
        yield "warn", text, "add cma=256M to APPEND in /boot/extlinux/extlinux.conf and reboot"
    else:
        yield "ok", text


def swap(machine: Machine) -> Iterator[Outcome]:
    """Swap, on a Jetson of little memory."""
    fields = machine.fields("proc/meminfo")
    sizes = [fields.get(name, "").split(" ")[0] for name in ("MemTotal", "SwapTotal")]
    if not is_jetson(machine) or not all(size.isdigit() for size in sizes):
        return
    total, swapped = map(int, sizes)
    if total < SMALL_KB and not swapped:
        fix = "sudo fallocate -l 8G /swap && sudo chmod 600 /swap && sudo mkswap /swap && sudo swapon /swap (on NVMe)"
        yield "warn", f"none beside {total / 1e6:.1f} GB of memory", fix
    else:
        yield "ok", f"{swapped / 1e6:.1f} GB"


def power_mode(machine: Machine) -> Iterator[Outcome]:
    """Whether the fastest power mode is set: MAXN_SUPER, else MAXN, else that of most watts."""
    if not is_jetson(machine):
        return
    modes = power_modes(machine)
    found = re.search(r"pmode:\s*(\d+)", machine.read("var/lib/nvpmodel/status") or "")
    if not modes or found is None:
        yield "warn", "not found", "ask it: sudo nvpmodel -q"
        return
    now, best = int(found[1]), max(modes, key=lambda number: _rank(modes[number]))
    text = f"{modes.get(now, 'of an unknown name')} (mode {now})"
    if now == best or _rank(modes.get(now, "")) == _rank(modes[best]):
        yield "ok", text
    else:
        yield "warn", f"{text}; {modes[best]} is faster", f"sudo nvpmodel -m {best}"


def _rank(name: str) -> tuple[bool, bool, int]:
    watts = re.search(r"(\d+)W", name)
    return name == "MAXN_SUPER", name.startswith("MAXN"), int(watts[1]) if watts else 0


def clocks(machine: Machine) -> Iterator[Outcome]:
    """Whether the GPU's clock is held at its highest, so that the first frames are as fast as later ones."""
    if not is_jetson(machine):
        return
    place = next((place for place in GPU_CLOCKS if machine.path(place).exists()), None)
    low, high = (machine.number(f"{place}/{name}") if place else None for name in ("min_freq", "max_freq"))
    if low is None or high is None:
        yield "warn", "the GPU's clock: not found"
    elif low < high:
        yield "warn", f"the GPU's clock goes from {low / 1e6:.0f} to {high / 1e6:.0f} MHz", "sudo jetson_clocks"
    else:
        yield "ok", f"the GPU's clock is held at {high / 1e6:.0f} MHz"

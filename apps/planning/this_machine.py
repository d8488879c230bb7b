"""Describe this machine as a device to plan for. Linux reports memory, cores and clock; other figures are assumed."""

from __future__ import annotations

import platform

from edgevlm.engines.devices import DeviceProfile, Figure, FigureSource, load_device
from edgevlm.engines.devices.jetson import is_jetson, profile_of
from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.threads import default_threads
from edgevlm.runtime.free_memory import group_limits

NAME = "this machine"
ASSUMED_MHZ = 2000
SYSTEM_MIB = 1500
CHANNEL_GB_S = 25.6  # one 64-bit channel of DDR4-3200; two channels are assumed with more than FEW_CORES cores
FEW_CORES = 4
VECTORS = (  # a processor flag, its name, and its float32 and int8 operations per core and cycle
    ("avx512_vnni", "AVX-512 VNNI", 64, 256),
    ("avx512f", "AVX-512", 64, 128),
    ("avx_vnni", "AVX2 VNNI", 32, 128),
    ("avx2", "AVX2", 32, 64),
    ("asimddp", "NEON with dot products", 16, 64),
    ("asimd", "NEON", 16, 32),
)
PLAIN = ("SSE", 8, 16)
SOURCES = {"here": FigureSource("Read from Linux; figures that are not checked are assumed or derived", None)}


def this_machine(machine: Machine | None = None, cores: int | None = None) -> DeviceProfile:
    """Return this machine's profile. Unless this is a known Jetson, the profile is for the CPU with ``cores`` cores."""
    machine = machine or Machine()
    if is_jetson(machine) and (profile := profile_of(machine)) is not None:
        return profile
    return this_cpu(machine, cores)


def this_cpu(machine: Machine, cores: int | None = None) -> DeviceProfile:
    """Describe the processor and memory of ``machine``, including the memory limits of control groups."""
    cores = default_threads() if cores is None else cores
    cpu = machine.fields("proc/cpuinfo")
    memory = int((machine.fields("proc/meminfo").get("MemTotal") or "0 kB").split()[0]) >> 10
    memory = min([memory, *(each.total >> 20 for each in group_limits(machine.root))])
    highest = machine.number("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    mhz = highest / 1000 if highest else float(cpu.get("cpu MHz") or ASSUMED_MHZ)
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    vectors, fp32, int8 = next((row[1:] for row in VECTORS if row[0] in flags), PLAIN)
    known = {
        "memory_gib": Figure(round(memory / 1024, 1), "here", True),
        "usable_mib": Figure(memory, "here", True),
        "system_mib": Figure(min(SYSTEM_MIB, memory // 4), "here", False),
        "bandwidth_gb_s": Figure(CHANNEL_GB_S * (1 if cores <= FEW_CORES else 2), "here", False),
        "fp32_tflops": Figure(cores * mhz * fp32 / 1e6, "here", False),
        "int8_tops": Figure(cores * mhz * int8 / 1e6, "here", False),
        "max_watts": Figure(None, "here", False),
    }
    name = cpu.get("model name") or platform.machine()
    title = f"this machine ({name}, {cores} cores with {vectors} at {mhz / 1000:.1f} GHz, {memory / 1024:.0f} GiB)"
    example = load_device("cpu")
    return DeviceProfile(NAME, title, "cpu", (), {**example.figures, **known}, {**example.sources, **SOURCES})


def device_named(name: str | None) -> DeviceProfile:
    """Return the device called ``name``, or this machine if ``name`` is None. Raises UserError for an unknown device."""
    return this_machine() if name is None else load_device(name)


def assumptions(device: DeviceProfile) -> str:
    """Return text that lists the figures assumed for this machine, or "" for any other device."""
    if device.name != NAME:
        return ""
    return f"assumed: {device['bandwidth_gb_s']:g} GB/s of bandwidth, {device['system_mib'] / 1024:.1f} GiB for the system"

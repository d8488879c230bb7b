"""This machine as a device to plan for: memory, cores and clock as Linux reports them, the rest marked as assumed."""

from __future__ import annotations

import platform

from edgevlm.engines.devices import DeviceProfile, Figure, FigureSource, load_device
from edgevlm.engines.devices.jetson import is_jetson, profile_of
from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.threads import default_threads

NAME = "this machine"
ASSUMED_MHZ = 2000
SYSTEM_MIB = 1500  # allowed for the system, up to a quarter of the memory
CHANNEL_GB_S = 25.6  # DDR4-3200, 64 bits; two channels are assumed beyond FEW_CORES
FEW_CORES = 4
VECTORS = (  # a processor's flag, what it is called, and its float32 and int8 operations a core and cycle
    ("avx512_vnni", "AVX-512 VNNI", 64, 256),
    ("avx512f", "AVX-512", 64, 128),
    ("avx_vnni", "AVX2 VNNI", 32, 128),
    ("avx2", "AVX2", 32, 64),
    ("asimddp", "NEON with dot products", 16, 64),
    ("asimd", "NEON", 16, 32),
)
PLAIN = ("SSE", 8, 16)
SOURCES = {
    "linux": FigureSource("Described by Linux: /proc/meminfo, /proc/cpuinfo, cpufreq and the cgroup", None),
    "assumed": FigureSource("Assumed, not measured: one channel of DDR4-3200 up to four cores, two beyond", None),
    "worked out": FigureSource("Worked out: cores x clock x operations a cycle of the widest vectors", None),
}


def this_machine(machine: Machine | None = None, cores: int | None = None) -> DeviceProfile:
    """The Jetson that ``machine`` is, or its processor. cores: physical cores that may be used."""
    machine = machine or Machine()
    if is_jetson(machine) and (profile := profile_of(machine)) is not None:
        return profile
    return this_cpu(machine, cores)


def this_cpu(machine: Machine, cores: int | None = None) -> DeviceProfile:
    """Only the processor of ``machine``, with all of its memory."""
    cores = default_threads() if cores is None else cores
    cpu, mhz, memory = machine.fields("proc/cpuinfo"), clock_mhz(machine), memory_mib(machine)
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    vectors, fp32, int8 = next((row[1:] for row in VECTORS if row[0] in flags), PLAIN)
    bandwidth = CHANNEL_GB_S * (1 if cores <= FEW_CORES else 2)
    known = {
        "memory_gib": Figure(round(memory / 1024, 1), "linux", True),
        "usable_mib": Figure(memory, "linux", True),
        "system_mib": Figure(min(SYSTEM_MIB, memory // 4), "assumed", False),
        "bandwidth_gb_s": Figure(bandwidth, "assumed", False),
        "fp32_tflops": Figure(cores * mhz * fp32 / 1e6, "worked out", False),
        "int8_tops": Figure(cores * mhz * int8 / 1e6, "worked out", False),
        "max_watts": Figure(None, "linux", False),
    }
    name = cpu.get("model name") or platform.machine()
    title = f"this machine ({name}, {cores} cores with {vectors} at {mhz / 1000:.1f} GHz, {memory / 1024:.0f} GiB)"
    figures = {**load_device("cpu").figures, **known}
    return DeviceProfile(NAME, title, "cpu", (), figures, {**load_device("cpu").sources, **SOURCES})


def device_named(name: str | None) -> DeviceProfile:
    """The device of this name, this machine for None. Raises UserError for an unknown device."""
    return this_machine() if name is None else load_device(name)


def assumptions(device: DeviceProfile) -> str:
    """Name this machine's assumed figures; empty for other devices."""
    if device.name != NAME:
        return ""
    return (
        f"assumed: {device['bandwidth_gb_s']:g} GB/s of memory bandwidth, {device['system_mib'] / 1024:.1f} GiB for the system "
        "(edgevlm bench stream measures)"
    )


def clock_mhz(machine: Machine) -> float:
    """The first core's highest clock, or its present one."""
    if highest := machine.number("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"):
        return highest / 1000
    try:
        return float(machine.fields("proc/cpuinfo")["cpu MHz"])
    except (KeyError, ValueError):
        return ASSUMED_MHZ


def memory_mib(machine: Machine) -> int:
    """Installed memory, or the cgroup's limit."""
    total = int((machine.fields("proc/meminfo").get("MemTotal") or "0 kB").split()[0]) >> 10
    allowed = machine.number("sys/fs/cgroup/memory.max")
    return min(total, allowed >> 20) if allowed else total

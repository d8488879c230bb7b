"""The kinds of meter. Each is a function: a machine's meter, or why it has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.power import Meter, Reading

HWMON, POWERCAP = "sys/class/hwmon", "sys/class/powercap"
INPUT = "VDD_IN"  # the module's whole input, of Orin NX and Nano
FED = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}  # of AGX Orin: a rail, and the one that feeds it
ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


def ina3221(machine: Machine) -> Meter | str:
    """A Jetson's power monitors, Texas Instruments' INA3221: three rails each, in sysfs as the kernel's driver has them."""
    channels = dict(_channels(machine))
    if not channels:
        return "no INA3221 in /sys/class/hwmon"

    def read() -> dict[str, Reading]:
        found = {}
        for rail, (folder, n) in channels.items():
            millivolts, milliamperes = (machine.number(f"{folder}/{kind}{n}_input") for kind in ("in", "curr"))
            if millivolts is not None and milliamperes is not None:
                found[rail] = Reading(watts=millivolts * milliamperes / 1e6)
        return found

    rails = tuple(channels)
    if INPUT in rails:
        return Meter("ina3221", rails, (INPUT,), f"{INPUT} is the module's input", read)
    summed = tuple(rail for rail in rails if FED.get(rail) not in rails)
    return Meter("ina3221", rails, summed, "no rail is the whole input; what another rail feeds is not added", read)


def _channels(machine: Machine) -> Iterator[tuple[str, tuple[str, int]]]:
    """Rail -> its folder and n of ``in{n}_label`` (``NC``: not connected), ``in{n}_input``, mV, and ``curr{n}_input``, mA."""
    for folder in machine.names(HWMON):
        name = f"{HWMON}/{folder}"
        if not (machine.read(f"{name}/name") or "").startswith("ina3221"):
            continue
        for n in (1, 2, 3):  # what follows are sums of shunt voltages
            label = (machine.read(f"{name}/in{n}_label") or "NC").strip()
            if label and label != "NC":
                yield label, (name, n)


def nvml(machine: Machine) -> Meter | str:
    """Graphics cards through NVIDIA's management library: joules that a card counts, or watts of one too old to count."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return "the package nvidia-ml-py is not installed"
    library: Any = pynvml
    try:
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        names = [library.nvmlDeviceGetName(card) for card in handles]
    except library.NVMLError as error:
        return str(error)
    texts = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    cards = {f"GPU {index} {text}": card for index, (text, card) in enumerate(zip(texts, handles, strict=True))}

    def reading(card: Any) -> Reading:
        try:
            return Reading(joules=library.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3)
        except library.NVMLError_NotSupported:
            return Reading(watts=library.nvmlDeviceGetPowerUsage(card) / 1e3)

    def read() -> dict[str, Reading]:
        found = {}
        for rail, card in cards.items():
            with suppress(library.NVMLError):
                found[rail] = reading(card)
        return found

    why = "each graphics card; the rest of the computer is not in it"
    return Meter("nvml", tuple(cards), tuple(cards), why, read) if read() else "no graphics card reports its power"


def rapl(machine: Machine) -> Meter | str:
    """An x86 processor's energy counters (RAPL) through Linux's powercap: microjoules, which restart at 0 at a stated range.

    ``package-0`` is a socket with its cores; it holds ``core`` and ``uncore`` but not ``dram``; ``psys`` is the board.
    """
    zones = dict(_zones(machine))
    if not zones:
        return "no RAPL counter in /sys/class/powercap"

    def read() -> dict[str, Reading]:
        found = {}
        for rail, zone in zones.items():
            counted, range_ = (machine.number(f"{zone}/{name}") for name in ("energy_uj", "max_energy_range_uj"))
            if counted is not None:
                found[rail] = Reading(joules=counted / 1e6, wraps=range_ / 1e6 if range_ else None)
        return found

    sockets = tuple(rail for rail in zones if rail.startswith("package") or rail.endswith("dram"))
    summed, why = sockets, "each socket and its memory; the rest of the computer is not in it"
    if "psys" in zones:
        summed, why = ("psys",), "psys is the board"
    if not set(summed) & set(read()):
        return "RAPL's counters cannot be read; sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, or run as root"
    return Meter("rapl", tuple(zones), summed, why, read)


def _zones(machine: Machine) -> Iterator[tuple[str, str]]:
    """Rail -> its folder; zones below a package are named after it."""
    names: dict[str, str] = {}
    for folder in machine.names(POWERCAP):
        name = machine.read(f"{POWERCAP}/{folder}/name")
        if not ZONE.fullmatch(folder) or not name:
            continue
        names[folder] = name
        parent = names.get(folder.rpartition(":")[0])
        yield (f"{parent} {name}" if parent else name), f"{POWERCAP}/{folder}"


METERS: dict[str, Callable[[Machine], Meter | str]] = {"ina3221": ina3221, "nvml": nvml, "rapl": rapl}  # by preference

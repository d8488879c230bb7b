"""An x86 processor's energy counters (RAPL) through Linux's powercap: micro-joules, which begin again at 0 at a stated range.

``package-0`` is a socket with its cores; ``dram`` beside it is not in it, ``core`` and ``uncore`` are; ``psys`` is the board.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.power import Meter, Reading

POWERCAP = "sys/class/powercap"
ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


class Rapl:
    """See :class:`edgevlm.engines.power.Meter`."""

    name = "rapl"

    def __init__(self, machine: Machine, zones: dict[str, str]) -> None:
        self._machine, self._zones = machine, zones
        self.rails: tuple[str, ...] = tuple(zones)
        self.summed: tuple[str, ...]
        if "psys" in zones:
            self.summed = ("psys",)
            self.why = "psys is the board"
        else:
            self.summed = tuple(rail for rail in zones if rail.startswith("package") or rail.endswith("dram"))
            self.why = "each socket and its memory; what the rest of the computer takes is not in it"

    def read(self) -> dict[str, Reading]:
        """Joules of each zone whose counter can be read."""
        found = {}
        for rail, zone in self._zones.items():
            counted, range_ = (self._machine.number(f"{zone}/{name}") for name in ("energy_uj", "max_energy_range_uj"))
            if counted is not None:
                found[rail] = Reading(joules=counted / 1e6, wraps=range_ / 1e6 if range_ else None)
        return found


def find(machine: Machine) -> Meter | str:
    """The counters of a machine, or why there are none."""
    zones = dict(_zones(machine))
    meter = Rapl(machine, zones)
    if not zones:
        return "no RAPL counter in /sys/class/powercap"
    if not any(rail in meter.read() for rail in meter.summed):
        return "RAPL's counters may not be read; sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, or run as root"
    return meter


def _zones(machine: Machine) -> Iterator[tuple[str, str]]:
    """Rail -> its folder; zones below a package are named after it."""
    place = machine.path(POWERCAP)
    names: dict[str, str] = {}
    for folder in sorted(path.name for path in place.iterdir()) if place.is_dir() else ():
        name = machine.read(f"{POWERCAP}/{folder}/name")
        if not ZONE.fullmatch(folder) or not name:
            continue
        names[folder] = name
        parent = names.get(folder.rpartition(":")[0])
        yield (f"{parent} {name}" if parent else name), f"{POWERCAP}/{folder}"

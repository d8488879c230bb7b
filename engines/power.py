"""Read power and energy from the machine's meters. Without a meter, nothing is reported.

A meter measures one or more supply rails, in watts or joules. Rails that are supplied by another measured rail do not count
towards the total.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edgevlm.engines.devices.machine import Machine

NOT_MEASURED = "not measured"
HWMON, POWERCAP = "sys/class/hwmon", "sys/class/powercap"
INPUT = "VDD_IN"
FED = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}  # a rail -> the rail that feeds it, on AGX Orin
ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
INTERVAL_S = 0.1  # between two readings; an INA3221 averages over some tens of milliseconds


@dataclass(frozen=True, slots=True)
class Reading:
    """What a supply rail's meter showed at one moment, in watts or in joules. ``wraps``: after how many joules a counter
    restarts at 0.
    """

    watts: float | None = None
    joules: float | None = None
    wraps: float | None = None


@dataclass(frozen=True, slots=True)
class Meter:
    """A power meter. ``read()``: returns each supply rail's reading. ``summed``: the rails that add up to the total."""

    name: str
    rails: tuple[str, ...]
    summed: tuple[str, ...]
    why: str
    read: Callable[[], Mapping[str, Reading]]


def find_meter(machine: Machine | None = None) -> tuple[Meter | None, list[str]]:
    """Return the machine's meter or None, and a line for each kind of meter that was not found."""
    missing = list[str]()
    for name, find in METERS.items():
        found = find(machine or Machine())
        if isinstance(found, Meter):
            return found, missing
        missing.append(f"{name}: {found}")
    return None, missing


def ina3221(machine: Machine) -> Meter | str:
    """Return a meter for the Jetson's INA3221 power monitors, or why there is none."""
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
        return Meter("ina3221", rails, (INPUT,), f"{INPUT} measures the module's input", read)
    summed = tuple(rail for rail in rails if FED.get(rail) not in rails)
    return Meter("ina3221", rails, summed, "no rail measures the whole input; rails fed by another rail are not added", read)


def _channels(machine: Machine) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the label, folder and channel number of each connected supply rail.

    Channel n has its label in ``in{n}_label``, its millivolts in ``in{n}_input`` and its milliamperes in ``curr{n}_input``.
    """
    for folder in machine.names(HWMON):
        name = f"{HWMON}/{folder}"
        if not (machine.read(f"{name}/name") or "").startswith("ina3221"):
            continue
        for n in (1, 2, 3):  # channels with higher numbers are sums of shunt voltages
            label = (machine.read(f"{name}/in{n}_label") or "NC").strip()
            if label and label != "NC":
                yield label, (name, n)


def nvml(machine: Machine) -> Meter | str:
    """Return a meter for NVIDIA cards, or why there is none. Newer cards count joules; older cards report watts."""
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

    def read() -> dict[str, Reading]:
        found = {}
        for rail, card in cards.items():
            with suppress(library.NVMLError):
                try:
                    found[rail] = Reading(joules=library.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3)
                except library.NVMLError_NotSupported:
                    found[rail] = Reading(watts=library.nvmlDeviceGetPowerUsage(card) / 1e3)
        return found

    why = "each graphics card, without the rest of the computer"
    return Meter("nvml", tuple(cards), tuple(cards), why, read) if read() else "no graphics card reports power"


def rapl(machine: Machine) -> Meter | str:
    """Return a meter for an x86 processor's energy counters (RAPL), or why there is none.

    ``package-0`` is a socket: it includes ``core`` and ``uncore``, but not ``dram``. ``psys`` covers the whole board.
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
    summed, why = sockets, "each socket and its memory, without the rest of the computer"
    if "psys" in zones:
        summed, why = ("psys",), "psys measures the board"
    if not set(summed) & set(read()):
        return "RAPL counters cannot be read; run sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, or run as root"
    return Meter("rapl", tuple(zones), summed, why, read)


def _zones(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield the name and folder of each energy counter. A part of a package has a name like ``package-0 core``."""
    names: dict[str, str] = {}
    for folder in machine.names(POWERCAP):
        name = machine.read(f"{POWERCAP}/{folder}/name")
        if not ZONE.fullmatch(folder) or not name:
            continue
        names[folder] = name
        parent = names.get(folder.rpartition(":")[0])
        yield (f"{parent} {name}" if parent else name), f"{POWERCAP}/{folder}"


METERS: dict[str, Callable[[Machine], Meter | str]] = {
    "ina3221": ina3221,
    "nvml": nvml,
    "rapl": rapl,
}  # in order of preference


def gained(before: Reading | None, after: Reading | None, seconds: float) -> float | None:
    """Return the joules used between two readings ``seconds`` apart, or None if a reading is missing.

    Watts are integrated with the trapezoidal rule. If a counter falls, it has restarted at 0.
    """
    if before is None or after is None:
        return None
    if before.joules is not None and after.joules is not None:
        if after.joules >= before.joules:
            return after.joules - before.joules
        return None if after.wraps is None else after.joules + after.wraps - before.joules
    if before.watts is not None and after.watts is not None:
        return seconds * (before.watts + after.watts) / 2
    return None


@dataclass(slots=True)
class Rail:
    """The energy that one supply rail delivered, in joules. ``seconds``: how long the energy was measured. ``gap_s``: for how
    many seconds readings were missing.
    """

    joules: float = 0.0
    seconds: float = 0.0
    gap_s: float = 0.0


class Energy:
    """Measures the energy used in a ``with`` block. A thread reads the meter every ``interval_s`` seconds."""

    def __init__(self, meter: Meter, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.meter = meter
        self.rails = {name: Rail() for name in meter.rails}
        self._last: tuple[float, Mapping[str, Reading]] | None = None
        self._interval, self._clock, self._over = interval_s, clock, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="energy", daemon=True)

    def __enter__(self) -> Energy:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.sample()

    def sample(self) -> None:
        found, now = self.meter.read(), self._clock()
        if self._last is not None:
            seconds = now - self._last[0]
            for name, rail in self.rails.items():
                more = gained(self._last[1].get(name), found.get(name), seconds)
                if more is None:
                    rail.gap_s += seconds
                else:
                    rail.joules, rail.seconds = rail.joules + more, rail.seconds + seconds
        self._last = now, found

    @property
    def joules(self) -> float | None:
        """Return the total joules, or None if a reading is missing."""
        summed = [self.rails[name] for name in self.meter.summed]
        return None if not summed or any(rail.gap_s or not rail.seconds for rail in summed) else sum(r.joules for r in summed)

    @property
    def seconds(self) -> float:
        """Return how long the energy was measured, in seconds."""
        return max((rail.seconds for rail in self.rails.values()), default=0.0)

    @property
    def watts(self) -> float | None:
        """Return the mean power, or None if the energy was not measured."""
        return None if self.joules is None else self.joules / self.seconds

    def figures(self) -> dict[str, Any]:
        """Return the results as a dict for JSON, with None for values that were not measured."""
        rails = {name: {"joules": round(rail.joules, 3), "gap_s": round(rail.gap_s, 3)} for name, rail in self.rails.items()}
        return {
            "meter": self.meter.name, "joules": None if self.joules is None else round(self.joules, 3),
            "watts": None if self.watts is None else round(self.watts, 3), "summed": list(self.meter.summed), "rails": rails,
        }  # fmt: skip

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            self.sample()

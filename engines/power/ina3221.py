"""A Jetson's power monitors, Texas Instruments' INA3221: three rails each, in sysfs as the kernel's driver has them.

``in{n}_label`` names a channel, ``in{n}_input`` is its voltage in mV and ``curr{n}_input`` its current in mA, n from 1 to 3.
What follows (sums of shunt voltages) is no rail, nor is a channel without a label or with ``NC``: not connected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.power import Meter, Reading

HWMON = "sys/class/hwmon"
INPUT = "VDD_IN"  # the module's whole input, of Orin NX and Nano
FED = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}  # of AGX Orin: a rail, and the one that feeds it


class Ina3221:
    """See :class:`edgevlm.engines.power.Meter`."""

    name = "ina3221"

    def __init__(self, machine: Machine, channels: Mapping[str, tuple[str, int]]) -> None:
        self._machine, self._channels = machine, channels
        self.rails = tuple(channels)
        self.summed, self.why = _total(self.rails)

    def read(self) -> dict[str, Reading]:
        """Watts of each rail whose voltage and current can both be read."""
        found = {}
        for rail, (folder, n) in self._channels.items():
            millivolts, milliamperes = (self._machine.number(f"{folder}/{kind}{n}_input") for kind in ("in", "curr"))
            if millivolts is not None and milliamperes is not None:
                found[rail] = Reading(watts=millivolts * milliamperes / 1e6)
        return found


def _total(rails: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    if INPUT in rails:
        return (INPUT,), f"{INPUT} is the module's input"
    summed = tuple(rail for rail in rails if FED.get(rail) not in rails)
    return summed, "there is no rail of the whole input; what another rail feeds is not added"


def find(machine: Machine) -> Meter | str:
    """The monitors of a machine, or why there are none."""
    channels = dict(_channels(machine))
    return Ina3221(machine, channels) if channels else "no INA3221 in /sys/class/hwmon"


def _channels(machine: Machine) -> Iterator[tuple[str, tuple[str, int]]]:
    """Rail -> its folder and number."""
    place = machine.path(HWMON)
    for folder in sorted(place.iterdir()) if place.is_dir() else ():
        name = f"{HWMON}/{folder.name}"
        if not (machine.read(f"{name}/name") or "").startswith("ina3221"):
            continue
        for n in (1, 2, 3):
            label = (machine.read(f"{name}/in{n}_label") or "NC").strip()
            if label and label != "NC":
                yield label, (name, n)

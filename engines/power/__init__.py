"""Power and energy, as the machine itself measures them; where it measures nothing, nothing is reported.

A meter has rails: places where watts are measured, or joules counted. Its total is the sum of the rails it names as ``summed``:
a rail that another feeds is not added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgevlm.engines.devices.machine import Machine

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Reading:
    """One rail at one moment: watts, or joules counted (a counter restarts at 0 after ``wraps`` joules)."""

    watts: float | None = None
    joules: float | None = None
    wraps: float | None = None


@dataclass(frozen=True, slots=True)
class Meter:
    """``read`` returns what can be read now, by rail. ``summed``: the rails of the total, and ``why`` those, in words."""

    name: str
    rails: tuple[str, ...]
    summed: tuple[str, ...]
    why: str
    read: Callable[[], Mapping[str, Reading]]


def find_meter(machine: Machine | None = None) -> tuple[Meter | None, list[str]]:
    """The machine's meter, and for each kind of meter that it lacks, one line: why."""
    from edgevlm.engines.power.meters import METERS

    missing = list[str]()
    for name, find in METERS.items():
        found = find(machine or Machine())
        if isinstance(found, Meter):
            return found, missing
        missing.append(f"{name}: {found}")
    return None, missing

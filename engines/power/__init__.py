"""Power and energy, of what the machine itself measures; where it measures nothing, nothing is said.

A meter is one file and one name in METERS. It has rails: places where watts are measured, or joules counted since some time.
The total is the sum of the rails that it names as ``summed``: a rail that another feeds is not added to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from edgevlm.engines.devices.machine import Machine

METERS = ("ina3221", "nvml", "rapl")  # modules; the first that measures something is used
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Reading:
    """One rail at one moment: watts, or joules counted (a counter begins again at 0 after ``wraps`` joules)."""

    watts: float | None = None
    joules: float | None = None
    wraps: float | None = None


class Meter(Protocol):
    """Rails of one kind. ``rails``: all that are read. ``summed``: those that make the total, and ``why`` in words."""

    @property
    def name(self) -> str: ...

    @property
    def rails(self) -> Sequence[str]: ...

    @property
    def summed(self) -> Sequence[str]: ...

    @property
    def why(self) -> str: ...

    def read(self) -> Mapping[str, Reading]:
        """What can be read now, by rail; a rail that cannot is left out."""
        ...


def find_meter(machine: Machine | None = None) -> tuple[Meter | None, list[str]]:
    """The machine's meter, and one line a kind of meter that it has not: why."""
    missing = list[str]()
    for name in METERS:
        found: Meter | str = import_module(f"{__name__}.{name}").find(machine or Machine())
        if not isinstance(found, str):
            return found, missing
        missing.append(f"{name}: {found}")
    return None, missing

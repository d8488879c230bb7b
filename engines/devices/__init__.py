"""Devices to run on, one JSON file each: the file's name is the device's, and adding one is adding a file.

A file has a ``title``, a ``kind`` (jetson, cuda or cpu), the ``modules`` that a Jetson's device tree names it by, ``figures``
and ``sources``. Each figure is a ``value``, the ``source`` it was taken from, and whether it was ``checked``: looked up in that
source or in a text that quotes it. A figure that is not checked is from memory or an allowance. Names contain the unit; rates
are dense unless the name contains ``sparse``; null means that the device lacks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from edgevlm.errors import UserError, nearest


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, its source's key in :attr:`DeviceProfile.sources`, and whether it was looked up there."""

    value: Any
    source: str
    checked: bool


@dataclass(frozen=True, slots=True)
class FigureSource:
    """A document and its address; None for figures that are computed or allowed for here."""

    document: str
    address: str | None


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device. ``device["bandwidth_gb_s"]`` is a figure's value; its name has the unit."""

    name: str
    title: str
    kind: str
    modules: tuple[str, ...]
    figures: Mapping[str, Figure]
    sources: Mapping[str, FigureSource]

    def __getitem__(self, figure: str) -> Any:
        return self.figures[figure].value

    @property
    def usable_bytes(self) -> int:
        """The memory left for a program beside the system."""
        return int(self["usable_mib"] - self["system_mib"]) << 20


def device_names() -> list[str]:
    """Return every device, in the order of its name."""
    return sorted(file.name.removesuffix(".json") for file in files(__name__).iterdir() if file.name.endswith(".json"))


@cache
def load_device(name: str) -> DeviceProfile:
    """Return the device of a name; raises UserError, one line that names the nearest, for an unknown one."""
    known = device_names()
    if name not in known:
        raise UserError(f"no device is called {name!r}; {nearest(name, known)}")
    data = json.loads(files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return DeviceProfile(
        name=name,
        title=data["title"],
        kind=data["kind"],
        modules=tuple(data["modules"]),
        figures={key: Figure(**figure) for key, figure in data["figures"].items()},
        sources={key: FigureSource(**source) for key, source in data["sources"].items()},
    )

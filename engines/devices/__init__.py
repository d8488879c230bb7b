"""Describe the devices that edgevlm runs on, each in a JSON file named after the device.

A file has a ``title``, a ``kind`` (jetson, cuda or cpu), ``modules`` (a Jetson's names in its device tree), ``figures`` and
``sources``. A figure's name contains its unit. A figure is ``checked`` if we looked its value up in the source or in a text
that quotes the source; otherwise we remembered or estimated it. Rates are for dense matrices unless their names contain
``sparse``. If a value is null, the device lacks the feature.
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
    """A number or fact about a device. ``source`` is a key of :attr:`DeviceProfile.sources`."""

    value: Any
    source: str
    checked: bool


@dataclass(frozen=True, slots=True)
class FigureSource:
    """A document that we took figures from. ``address`` is None if the figures are computed or estimated."""

    document: str
    address: str | None


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device. ``device["bandwidth_gb_s"]`` returns the value of the figure ``bandwidth_gb_s``."""

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
        """Return how much memory a program can use, in bytes."""
        return int(self["usable_mib"] - self["system_mib"]) << 20


def device_names() -> list[str]:
    return sorted(file.name.removesuffix(".json") for file in files(__name__).iterdir() if file.name.endswith(".json"))


@cache
def load_device(name: str) -> DeviceProfile:
    """Return a device by name. For an unknown name, raise a UserError that suggests a similar name."""
    known = device_names()
    if name not in known:
        raise UserError(f"unknown device {name!r}; {nearest(name, known)}")
    data = json.loads(files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return DeviceProfile(
        name=name,
        title=data["title"],
        kind=data["kind"],
        modules=tuple(data["modules"]),
        figures={key: Figure(**figure) for key, figure in data["figures"].items()},
        sources={key: FigureSource(**source) for key, source in data["sources"].items()},
    )

"""Graphics cards through NVIDIA's management library: joules counted by the card, or watts from one too old to count."""

from __future__ import annotations

from typing import Any

from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.power import Meter, Reading


class Nvml:
    """See :class:`edgevlm.engines.power.Meter`. One rail a card, the whole card."""

    name = "nvml"
    why = "each graphics card; what the rest of the computer takes is not in it"

    def __init__(self, nvml: Any, cards: dict[str, Any]) -> None:
        self._nvml, self._cards = nvml, cards
        self.rails = self.summed = tuple(cards)

    def read(self) -> dict[str, Reading]:
        """Joules since the driver was loaded, or watts, of each card that answers."""
        found = {}
        for rail, card in self._cards.items():
            try:
                found[rail] = self._reading(card)
            except self._nvml.NVMLError:
                continue
        return found

    def _reading(self, card: Any) -> Reading:
        try:
            return Reading(joules=self._nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3)
        except self._nvml.NVMLError_NotSupported:
            return Reading(watts=self._nvml.nvmlDeviceGetPowerUsage(card) / 1e3)


def find(machine: Machine) -> Meter | str:
    """The cards of this machine, or why there are none."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return "the package nvidia-ml-py is not installed"
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        meter = Nvml(nvml, {f"GPU {index} {_name(nvml, card)}": card for index, card in enumerate(handles)})
    except nvml.NVMLError as error:
        return str(error)
    return meter if meter.read() else "no graphics card that says what it takes"


def _name(nvml: Any, card: Any) -> str:
    name = nvml.nvmlDeviceGetName(card)
    return name.decode() if isinstance(name, bytes) else str(name)

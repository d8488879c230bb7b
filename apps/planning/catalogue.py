"""``edgevlm models``: published checkpoints that edgevlm takes, and what each would do on a machine.

models.json holds facts as the hub has them: name, licence, and what a plan needs of config.json. ``checked`` names what was
looked up elsewhere, of licence and geometry; the rest is from memory. We have run none of them with real weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from edgevlm.apps.planning.model import PlannedModel, planned, published_facts
from edgevlm.apps.planning.plan import PlanRequest, choose, figure
from edgevlm.apps.planning.this_machine import assumptions, device_named
from edgevlm.apps.schemas import json_line
from edgevlm.runtime.bundle import PixelBudget

CAMERA = (480, 640)  # (height, width) of the frames planned for


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint of the hub: its name there, its licence and what was looked up of both."""

    name: str
    licence: str
    checked: tuple[str, ...]
    model: PlannedModel

    @property
    def parameters(self) -> int:
        """Weights that a stream uses, without blocks of a tower that it skips."""
        model = self.model
        return model.matrices + model.vectors + model.table * (1 if model.tied else 2) + model.tower.parameters


def checkpoints() -> list[PublishedCheckpoint]:
    """All of models.json, the smallest first."""

    def sized(factor: int, budget: tuple[int, int], clip: int) -> tuple[int, int]:
        return PixelBudget(factor, budget[0], budget[1] * clip, clip).fitted(*CAMERA)

    found = [
        PublishedCheckpoint(fact["id"], fact["licence"], tuple(fact["checked"]), planned(fact["id"], fact["config"], sized))
        for fact in published_facts()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.parameters)


def show(name: str | None, fps: float, as_json: bool) -> Iterator[str]:
    """Yield the lines of the command. Raises UserError for an unknown device and an invalid rate."""
    device = device_named(name)
    if not as_json:
        predicted = f"Predicted by edgevlm plan, {fps:g} frames a second asked; we have run none of these with real weights."
        for text in (f"For {device.title}", predicted, assumptions(device)):
            yield from wrap(text, 80)
        yield f"\n{'model':<43}{'licence':<14}{' weights':<11}{'GB':>6}{'fps':>6}"
    for each in checkpoints():
        plan = choose(each.model, device, PlanRequest("", name, fps=fps))
        precision, rate, total = plan.roofline.precision, plan.speed.prefill_fps, plan.memory.total
        facts: dict[str, Any] = {
            "model": each.name,
            "family": each.model.family,
            "licence": each.licence,
            "checked": list(each.checked),
        }
        facts |= {"parameters": each.parameters, "measured": False, "device": device.name, "precision": precision}
        facts |= {"kv": plan.roofline.kv, "budget": plan.budget, "total_mb": round(total / 1e6, 1), "fits": plan.fits}
        facts |= {"fps": round(rate, 3), "keeps_up": plan.fits and plan.keeps_up}
        speed, weights = figure(rate) if plan.fits else "-", f"{size(each.parameters):>5} {precision:<5}"
        text = f"{each.name:<43}{each.licence:<14}{weights}{total / 1e9:>6.1f}{speed:>6}"
        yield json_line("model", facts) if as_json else text
    if not as_json:
        yield f"\nfps: most frames a second; '-' does not fit in {device.usable_bytes / 1e9:.1f} GB."


def size(parameters: int) -> str:
    """``256M`` or ``2.2B``."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 950e6 else f"{parameters / 1e6:.0f}M"

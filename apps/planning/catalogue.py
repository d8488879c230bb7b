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
from edgevlm.apps.planning.plan import DevicePlan, PlanRequest, choose, figure
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


def line(checkpoint: PublishedCheckpoint, plan: DevicePlan) -> dict[str, Any]:
    """A checkpoint on a device, as JSON. MB are 1e6 bytes."""
    roofline = plan.roofline
    return {
        "model": checkpoint.name, "family": checkpoint.model.family, "licence": checkpoint.licence,
        "checked": list(checkpoint.checked), "parameters": checkpoint.parameters, "measured": False,
        "device": roofline.device.name, "precision": roofline.precision, "kv": roofline.kv, "budget": plan.budget,
        "total_mb": round(plan.memory.total / 1e6, 1), "fits": plan.fits,
        "fps": round(plan.speed.prefill_fps, 3), "keeps_up": plan.fits and plan.keeps_up,
    }  # fmt: skip


def show(name: str | None, fps: float, as_json: bool) -> Iterator[str]:
    """Yield the lines of the command. Raises UserError for an unknown device and an invalid rate."""
    device = device_named(name)
    rows = [(checkpoint, choose(checkpoint.model, device, PlanRequest("", name, fps=fps))) for checkpoint in checkpoints()]
    if as_json:
        yield from (json_line("model", line(*row)) for row in rows)
        return
    predicted = f"Predicted by edgevlm plan, {fps:g} frames a second asked; we have run none of these with real weights."
    for text in (f"For {device.title}", predicted, assumptions(device)):
        yield from wrap(text, 80)
    yield ""
    yield f"{'model':<43}{'licence':<14}{' weights':<11}{'GB':>6}{'fps':>6}"
    for checkpoint, plan in rows:
        found = line(checkpoint, plan)
        rate = figure(found["fps"]) if plan.fits else "-"
        yield (
            f"{checkpoint.name:<43}{checkpoint.licence:<14}{size(checkpoint.parameters):>5} {found['precision']:<5}"
            f"{plan.memory.total / 1e9:>6.1f}{rate:>6}"
        )
    yield ""
    yield f"fps: most frames a second; '-' does not fit in {device.usable_bytes / 1e9:.1f} GB."
    yield "weights: how many, and the precision chosen."


def size(parameters: int) -> str:
    """``256M`` or ``2.2B``."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 950e6 else f"{parameters / 1e6:.0f}M"

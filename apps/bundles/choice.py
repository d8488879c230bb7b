"""What ``edgevlm run`` chooses for a checkpoint that it has to export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgevlm.apps.bundles.cache import DEFAULTS
from edgevlm.apps.planning.model import PlannedModel, plan_checkpoint
from edgevlm.apps.planning.plan import DevicePlan, PlanRequest, choose, default_budget, figure
from edgevlm.apps.planning.this_machine import this_cpu
from edgevlm.engines.devices import DeviceProfile
from edgevlm.engines.devices.machine import Machine
from edgevlm.export.families import load_family
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle

Size = tuple[int, int]  # height, width


@dataclass
class ExportChoice:
    """Chooses export options that were not given; ``plan``: the result, None while nothing had to be chosen.

    frame_shape: returns the size of the source's frames, None if unknown; called once, for models that keep a frame's aspect,
    unless ``frame_size`` is given.
    """

    request: PlanRequest
    frame_size: Size | None
    frame_shape: Callable[[], Size | None]
    notify: Notify
    device: DeviceProfile | None = None
    plan: DevicePlan | None = None
    _looked: bool = False

    def options(self, folder: Path) -> dict[str, Any]:
        """Choose options of ``export_checkpoint`` for a checkpoint and notify of them. Raises UserError."""
        model = plan_checkpoint(folder, DEFAULTS["camera"])
        if load_family(model.family, folder).keeps_aspect and (size := self.size()):
            model = plan_checkpoint(folder, size)
        roofline = self._plan(model).roofline
        return {
            "precision": self.request.precision if model.precision != "fp32" else roofline.precision,
            "vision_precision": roofline.model.tower.precision,
            "kv": roofline.kv,
        }

    def size(self) -> Size | None:
        """Return the size of the frames to come, None if unknown."""
        if self.frame_size is None and not self._looked:
            self._looked, self.frame_size = True, self.frame_shape()
        return self.frame_size

    def _plan(self, model: PlannedModel) -> DevicePlan:
        """Plan with the nearest budget that a plan takes; a session checks whether it suits the policy."""
        asked, device = self.request.budget, self.device or this_cpu(Machine())
        budget = None if asked is None else min(max(asked, model.least_budget), model.most_budget)
        self.plan = plan = choose(model, device, replace(self.request, budget=budget))
        line, (height, width), rate = plan.line(), plan.roofline.model.tower.size, plan.speed.prefill_fps
        predicted = f"reach {figure(rate)} fps"
        if not plan.fits:
            predicted = f"need {line['total_mb'] / 1e3:.1f} GB of {line['usable_mb'] / 1e3:.1f}: take a smaller model"
        elif not plan.keeps_up:
            slower = f"give --fps {figure(0.95 * rate)}, or take a smaller model"
            predicted += f", {figure(plan.fps - rate)} too few: {slower}"
        self.notify(
            f"chose {line['precision']} weights, {line['vision_precision']} tower, {line['kv']} keys and values, frames of "
            f"{width}x{height}, budget {plan.budget}, {plan.fps:g} fps for {line['device']}; predicted to {predicted}"
        )
        return plan

    def suits(self, bundle: Bundle) -> bool:
        """Return whether a bundle of the checkpoint has the options asked for, and the frame size chosen."""
        stored = {"precision": bundle.decoder.precision, "kv": bundle.decoder.kv, "vision_precision": bundle.vision.precision}
        asked = all(getattr(self.request, name) in (None, value) for name, value in stored.items())
        size = bundle.vision.size if self.plan is None else self.plan.roofline.model.tower.size
        keeps_aspect = load_family(bundle.family, bundle.path).keeps_aspect
        return asked and (size == bundle.vision.size or bundle.vision.pixels is not None or not keeps_aspect)

    @property
    def asks(self) -> bool:
        """Whether an option was given that only an export can fulfil."""
        return any((self.request.precision, self.request.vision_precision, self.request.kv))

    @property
    def budget(self) -> int | None:
        """Tokens to keep where a run's default does not fit, else None."""
        if self.plan is None or self.request.budget is not None:
            return None
        return self.plan.budget if self.plan.budget < default_budget(self.plan.roofline.model) else None

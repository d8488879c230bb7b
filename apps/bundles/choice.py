"""What ``edgevlm run`` chooses for a checkpoint that it has to export, and whether a camera's frames suit a bundle."""

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
STRETCH = 1.1  # of a frame's aspect, from which on a warning is given: whole patches stretch a small frame by some percent


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
        roofline = self._plan(model, self.device or this_cpu(Machine()), self.request, "chose").roofline
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

    def _plan(self, model: PlannedModel, device: DeviceProfile, request: PlanRequest, verb: str) -> DevicePlan:
        """Plan with the nearest budget that a plan takes; a session checks whether it suits the policy."""
        budget = None if request.budget is None else min(max(request.budget, model.least_budget), model.most_budget)
        self.plan = plan = choose(model, device, replace(request, budget=budget))
        line, (height, width) = fields(plan), plan.roofline.model.tower.size
        rate, remedy = plan.speed.prefill_fps, line["remedy"]
        predicted = f"reach {figure(rate)} fps" + ("" if plan.keeps_up else f", {figure(plan.fps - rate)} too few")
        if not plan.fits:
            predicted = f"need {line['total_mb'] / 1e3:.1f} GB of {line['usable_mb'] / 1e3:.1f}"
        self.notify(
            f"{verb} {line['precision']} weights, {line['vision_precision']} tower, {line['kv']} keys and values, frames of "
            f"{width}x{height}, budget {plan.budget}, {plan.fps:g} fps for {line['device']}; predicted to {predicted}"
            + ("" if remedy is None else f": {remedy}")
        )
        return plan

    def suits(self, bundle: Bundle) -> bool:
        """Return whether a bundle of the checkpoint has the options asked for, and the frame size chosen."""
        stored = {"precision": bundle.decoder.precision, "kv": bundle.decoder.kv, "vision_precision": bundle.vision.precision}
        asked = all(getattr(self.request, name) in (None, value) for name, value in stored.items())
        size = bundle.vision.size if self.plan is None else self.plan.roofline.model.tower.size
        return asked and (size == bundle.vision.size or bundle.vision.pixels is not None or not keeps_aspect(bundle))

    def settle(self, bundle: Bundle) -> None:
        """Plan again for a cached bundle that is run in place of what was chosen."""
        assert self.plan is not None
        spec, planned = bundle.decoder, self.plan.roofline
        stored = replace(self.request, precision=spec.precision, kv=spec.kv, vision_precision=bundle.vision.precision)
        self._plan(planned.model, planned.device, stored, "it is")

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


def fields(plan: DevicePlan) -> dict[str, Any]:
    """Return a plan's fields for JSON; remedy: what helps where it does not fit or keep up."""
    roofline, size, rate = plan.roofline, plan.roofline.model.tower.size, plan.speed.prefill_fps
    slower = "" if not plan.fits else f"give --fps {figure(0.95 * rate)}, or "
    return {
        "device": roofline.device.name, "precision": roofline.precision, "vision_precision": roofline.model.tower.precision,
        "kv": roofline.kv, "frame_size": [size[1], size[0]], "budget": plan.budget, "fps": plan.fps,
        "predicted_fps": round(rate, 3), "total_mb": round(plan.memory.total / 1e6, 1),
        "usable_mb": round(roofline.device.usable_bytes / 1e6, 1), "fits": plan.fits, "keeps_up": plan.fits and plan.keeps_up,
        "remedy": None if plan.fits and plan.keeps_up else f"{slower}take a smaller model (edgevlm models)",
    }  # fmt: skip


def keeps_aspect(bundle: Bundle) -> bool:
    """Return whether the bundle's family is trained on frames of their own aspect."""
    return load_family(bundle.family, bundle.path).keeps_aspect


def stretched(bundle: Bundle, shape: Size) -> str | None:
    """Return a warning, with a remedy, where frames of ``shape`` lose an aspect that the bundle's family keeps."""
    (height, width), (tall, wide) = shape, bundle.vision.size
    if 1 / STRETCH < (width / height) / (wide / tall) < STRETCH or not keeps_aspect(bundle):
        return None
    how = f"give --frame-size {width}x{height}" + ("" if bundle.vision.pixels else " to edgevlm export")
    return f"warning: frames of {width}x{height} are stretched to this model's {wide}x{tall}; {how}"

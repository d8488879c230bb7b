"""``edgevlm plan`` and ``edgevlm models``: predict a model's memory and speed on a device before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from edgevlm.apps.planning.formulas import PlannedMemory, Roofline, Speed, camera_bytes, question_bytes
from edgevlm.apps.planning.model import PlannedModel, model_of, plan_published, published_facts
from edgevlm.apps.planning.this_machine import assumptions, device_named
from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices import DeviceProfile
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.budget import DEFAULT_BUDGET
from edgevlm.runtime.kv import KV_TYPES

CAMERA = (480, 640)  # (height, width) of the planned frames
PRECISIONS = {"cpu": ("fp32", "int8", "int4"), "cuda": ("fp16", "int8", "int4"), "jetson": ("fp16", "int8", "int4")}
"""Weights to choose from, the most accurate first; a CPU gains nothing by float16, which it computes as float32."""
NEARLY = 0.9  # if no precision keeps up, choose the most accurate one that is at least this fraction as fast as the fastest


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of ``edgevlm plan`` as typed; :func:`choose` chooses the options that are None.

    ``device`` is a name in :mod:`edgevlm.engines.devices`, or None for this machine.
    ``camera`` is the frames' (height, width).
    ``cameras`` is the number of a server's cameras, or None for ``edgevlm run``.
    """

    model: str
    device: str | None = None
    budget: int | None = None
    precision: str | None = None
    kv: str | None = None
    fps: float = 2.0
    chunk: int = 8
    camera: tuple[int, int] = CAMERA
    vision_precision: str | None = None
    cameras: int | None = None


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A planned run and its predicted memory and speed."""

    roofline: Roofline
    budget: int
    fps: float
    chunk: int
    memory: PlannedMemory
    speed: Speed

    @property
    def fits(self) -> bool:
        """Return whether all cameras fit into the device's usable memory."""
        return self.memory.total <= self.roofline.device.usable_bytes

    @property
    def keeps_up(self) -> bool:
        """Return whether the device keeps up with every camera's frames."""
        return self.camera_fps >= self.fps

    @property
    def camera_fps(self) -> float:
        return self.speed.prefill_fps / max(1, self.roofline.served)

    def line(self) -> dict[str, Any]:
        """Return the JSON fields, the most important first."""
        memory, speed, roofline = self.memory, self.speed, self.roofline
        model = roofline.model
        mb = {f"{name}_mb": round(getattr(memory, name) / 1e6, 1) for name in (*PlannedMemory.__slots__, "total")}
        return {
            **{name: mb.pop(name) for name in ("weights_mb", "kv_mb", "activations_mb", "total_mb")},
            "fits": self.fits,
            "prefill_fps": round(speed.prefill_fps, 3),
            "ttft_ms": round(speed.ttft_ms, 1),
            "tokens_per_s": round(speed.tokens_per_s, 2),
            "j_per_frame": None if speed.j_per_frame is None else round(speed.j_per_frame, 3),
            "bound_by": speed.bound_by if self.fits else "memory size",
            **mb,
            "model": model.name,
            "family": model.family,
            "device": roofline.device.name,
            "precision": roofline.precision,
            "vision_precision": model.tower.precision,
            "kv": roofline.kv,
            "budget": self.budget,
            "fps": self.fps,
            "usable_mb": round(roofline.device.usable_bytes / 1e6, 1),
            "keeps_up": self.keeps_up,
            "largest_budget": roofline.largest_budget(self.chunk, self.fps),
            "largest_fps": round(speed.prefill_fps, 3) if self.fits else 0.0,
            "tokens_per_frame": model.tower.rows / model.tower.group,
            "vision_ms": round(speed.vision_ms, 2),
            "prefill_ms": round(speed.prefill_ms, 2),
            "compression_ms": round(speed.compression_ms, 3),
            "cameras": max(1, roofline.served),
            "camera_mb": round(camera_bytes(model, self.budget, self.chunk, roofline.kv) / 1e6, 1),
            "question_mb": round(question_bytes(model, self.budget, roofline.kv) / 1e6, 1),
            "camera_fps": round(self.camera_fps, 3),
            "largest_cameras": roofline.most_cameras(self.budget, self.chunk, self.fps),
        }


def make_plan(request: PlanRequest) -> DevicePlan:
    """Make the requested plan. Raises UserError for an invalid device, model, precision or budget."""
    device = device_named(request.device)
    return choose(model_of(request.model, request.camera), device, request)


def choose(model: PlannedModel, device: DeviceProfile, request: PlanRequest) -> DevicePlan:
    """Make a plan, choosing the options that were not given.

    The chosen precision is the most accurate that keeps up with ``request.fps`` and fits in memory with at least half of the
    usual budget. If no precision is fast enough, the plan uses the most accurate one that fits in memory and is nearly as fast
    as the fastest. If no precision fits, the plan uses the smallest. Raises UserError for an invalid precision or
    budget.
    """
    if not request.fps > 0 or request.chunk < 1:
        raise UserError("--fps must be above 0 and --chunk 1 or more")
    kv, tower, least, most = request.kv, request.vision_precision, model.least_budget, model.most_budget
    kv = kv or (model.kv if device.kind == "cpu" else "fp16")
    if kv not in KV_TYPES:
        raise UserError(f"--kv {kv!r} is not supported; choose from {', '.join(KV_TYPES)}")
    if tower not in (None, "fp32", "fp16", "int8"):
        raise UserError(f"--vision-precision {tower!r} is not supported; choose from fp32, fp16, int8")
    if least > most or (request.budget is not None and not least <= request.budget <= most):
        asked = "" if request.budget is None else f"a budget of {request.budget} tokens is not supported by "
        raise UserError(f"{asked}{model.name}: two frames take {least} tokens, and its positions allow {most}")
    plans = []
    for precision in precisions(model, device, request.precision):
        stored = replace(model.tower, precision=tower or tower_precision(model, device, precision))
        roofline = Roofline(replace(model, tower=stored), device, precision, kv, request.cameras or 0)
        budget = suited_budget(roofline, request) if request.budget is None else request.budget
        memory, speed = roofline.memory(budget, request.chunk), roofline.speed(budget, request.chunk)
        plans.append(DevicePlan(roofline, budget, request.fps, request.chunk, memory, speed))
    if keeping := [plan for plan in plans if plan.fits and plan.keeps_up]:
        return max(keeping, key=lambda plan: plan.budget)  # max returns the first of equal plans
    if fitting := [plan for plan in plans if plan.fits]:
        enough = NEARLY * max(plan.speed.prefill_fps for plan in fitting)
        return next(plan for plan in fitting if plan.speed.prefill_fps >= enough)
    return min(plans, key=lambda plan: plan.memory.total)


def precisions(model: PlannedModel, device: DeviceProfile, asked: str | None) -> tuple[str, ...]:
    """Return the weight precisions that a plan may choose. Bundles and already rounded weights keep their precision.

    ``asked``: the precision that the user chose, or None.
    """
    if asked is not None:
        load_precision(asked)
        return (asked,)
    return (model.precision,) if model.files or model.precision != "fp32" else PRECISIONS[device.kind]


def tower_precision(model: PlannedModel, device: DeviceProfile, precision: str) -> str:
    """Return the tower's precision. For a checkpoint on a CPU, it is int8 if the decoder's weights are integers, else fp32."""
    if model.files or device.kind != "cpu":
        return model.tower.precision
    return "int8" if load_precision(precision).onnxruntime.matrices.is_integer else "fp32"


def suited_budget(roofline: Roofline, request: PlanRequest) -> int:
    """Return the default budget in whole frames, or a smaller one.

    To keep up with ``fps``, it may be smaller by up to half; to fit in memory, by any amount.
    """
    rows, usual = roofline.model.tower.rows, default_budget(roofline.model)
    for fps, least in ((request.fps, usual // 2), (0.0, 1)):
        budget = min(usual, roofline.largest_budget(request.chunk, fps)) // rows * rows
        if budget >= least:
            return budget
    return usual


def default_budget(model: PlannedModel) -> int:
    """Return a run's default budget: half of the model's positions, up to 6,000 tokens, in whole frames."""
    rows = model.tower.rows
    wanted = min(DEFAULT_BUDGET, model.limit // 2, model.most_budget) // rows * rows
    return max(wanted, model.least_budget)


def figure(rate: float) -> str:
    """Format a rate to two significant digits."""
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.1f}" if rate >= 0.995 else f"{rate:.2f}"


def describe(plan: DevicePlan) -> Iterator[str]:
    """Yield a plan as readable text: the JSON fields, with estimates rounded to two significant digits."""
    device, model, line = plan.roofline.device, plan.roofline.model, plan.line()
    yield from wrap(f"{model.name} ({model.family}) on {device.title}", 80)
    yield from wrap(assumptions(device), 80)
    verdict = "fits" if plan.fits else "does not fit"
    pace = "keeps up" if plan.keeps_up else "does not keep up"
    yield f"{verdict} in {line['usable_mb']:.0f} MB of usable memory, {pace} with {plan.fps:g} frames a second"
    yield ""
    for name, value in line.items():
        shown = format(float(f"{value:.2g}"), ",.10g") if isinstance(value, float) else value
        yield f"  {name.replace('_', ' '):<18}{shown}"


def show(request: PlanRequest, as_json: bool) -> Iterator[str]:
    """Yield the lines that ``edgevlm plan`` prints. Raises UserError."""
    plan = make_plan(request)
    yield from [json_line("plan", plan.line())] if as_json else describe(plan)


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint on the hub. Facts that ``checked`` does not list are unverified."""

    name: str
    licence: str
    checked: tuple[str, ...]
    model: PlannedModel

    @property
    def parameters(self) -> int:
        """Return the number of parameters, excluding vision-tower blocks that a stream does not use."""
        model = self.model
        return model.matrices + model.vectors + model.table * (1 if model.tied else 2) + model.tower.parameters


def checkpoints() -> list[PublishedCheckpoint]:
    """Return the models listed in models.json, smallest first."""
    found = [
        PublishedCheckpoint(fact["id"], fact["licence"], tuple(fact["checked"]), plan_published(fact, CAMERA))
        for fact in published_facts()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.parameters)


def show_models(name: str | None, fps: float, as_json: bool) -> Iterator[str]:
    """Yield the lines that ``edgevlm models`` prints. Raises UserError for an unknown device or an invalid rate."""
    device = device_named(name)
    if not as_json:
        predicted = f"Predicted by edgevlm plan, {fps:g} frames a second requested; none of these was run with real weights."
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
        yield f"\nfps: maximum frames a second; '-' does not fit in {device.usable_bytes / 1e9:.1f} GB."


def size(parameters: int) -> str:
    """Format a number of parameters, as in ``256M`` or ``2.2B``."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 950e6 else f"{parameters / 1e6:.0f}M"

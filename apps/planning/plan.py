"""``edgevlm plan``: what a model takes of a device and how fast it would be, before anything is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgevlm.apps.planning.memory import PlannedMemory, memory_of
from edgevlm.apps.planning.model import PlannedModel, model_of
from edgevlm.apps.planning.speed import Roofline, Speed, bound_by, fits, largest_budget, speed_of
from edgevlm.engines.devices import load_device
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.budget import DEFAULT_BUDGET
from edgevlm.runtime.kv import KV_TYPES

FIRST = (
    "weights_mb", "kv_mb", "activations_mb", "total_mb", "fits",
    "prefill_fps", "ttft_ms", "tokens_per_s", "j_per_frame", "bound_by",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What was asked for.

    None stands for the bundle's own precision, or that of a checkpoint which is rounded already, else int4 on a Jetson and fp32
    elsewhere; for fp16 keys and values on a
    GPU and the bundle's on a CPU; for a run's default budget. camera: (height, width) of its frames.
    """

    model: str
    device: str
    budget: int | None = None
    precision: str | None = None
    kv: str | None = None
    fps: float = 2.0
    chunk: int = 8
    camera: tuple[int, int] = (480, 640)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan: what was asked, and all that follows."""

    roofline: Roofline
    budget: int
    fps: float
    chunk: int
    memory: PlannedMemory
    speed: Speed

    def line(self) -> dict[str, Any]:
        """As JSON: the fields of :data:`FIRST`, then the rest. MB are 1e6 bytes."""
        memory, speed, roofline = self.memory, self.speed, self.roofline
        megabytes = {f"{name}_mb": round(getattr(memory, name) / 1e6, 1) for name in PlannedMemory.__slots__} | {
            "total_mb": round(memory.total / 1e6, 1)
        }
        known = megabytes | {
            "fits": fits(roofline, memory),
            "prefill_fps": round(speed.prefill_fps, 3),
            "ttft_ms": round(speed.ttft_ms, 1),
            "tokens_per_s": round(speed.tokens_per_s, 2),
            "j_per_frame": round(speed.j_per_frame, 3),
            "bound_by": bound_by(roofline, memory, speed),
            "model": roofline.model.name,
            "family": roofline.model.family,
            "device": roofline.device.name,
            "precision": roofline.precision,
            "kv": roofline.kv,
            "budget": self.budget,
            "fps": self.fps,
            "usable_mb": round(roofline.device.usable_bytes / 1e6, 1),
            "keeps_up": speed.prefill_fps >= self.fps,
            "largest_budget": largest_budget(roofline, self.chunk, self.fps),
            "largest_fps": round(speed.prefill_fps, 3) if fits(roofline, memory) else 0.0,
            "tokens_per_frame": roofline.model.tower.rows / roofline.model.tower.group,
            "vision_ms": round(speed.vision_ms, 2),
            "prefill_ms": round(speed.prefill_ms, 2),
            "compression_ms": round(speed.compression_ms, 3),
        }
        return {name: known.pop(name) for name in FIRST} | known


def make_plan(request: PlanRequest) -> DevicePlan:
    """Work a plan out. Raises UserError for a device, model, precision or budget that is none."""
    device, model = load_device(request.device), model_of(request.model, request.camera)
    is_made = bool(model.files) or model.precision != "fp32"
    precision = request.precision or (model.precision if is_made else "int4" if device.kind == "jetson" else "fp32")
    load_precision(precision)
    kv = request.kv or (model.kv if device.kind == "cpu" else "fp16")
    if kv not in KV_TYPES:
        raise UserError(f"--kv {kv!r} is not known; give {', '.join(KV_TYPES)}")
    if not request.fps > 0 or request.chunk < 1:
        raise UserError("--fps must be above 0 and --chunk 1 or more")
    budget = default_budget(model) if request.budget is None else request.budget
    if not model.least_budget <= budget <= model.most_budget:
        raise UserError(
            f"a budget of {budget} tokens does not suit {model.name}: two frames take {model.least_budget} and its positions "
            f"leave room for {model.most_budget}"
        )
    roofline = Roofline(model, device, precision, kv)
    memory = memory_of(model, device, precision, kv, budget, request.chunk)
    return DevicePlan(roofline, budget, request.fps, request.chunk, memory, speed_of(roofline, budget, request.chunk))


def default_budget(model: PlannedModel) -> int:
    """As a run's: half of the model's positions, 6,000 tokens at most, in whole frames."""
    rows = model.tower.rows
    wanted = min(DEFAULT_BUDGET, model.limit // 2, model.most_budget) // rows * rows
    return max(wanted, model.least_budget)


def describe(plan: DevicePlan) -> Iterator[str]:
    """A plan for a person."""
    line, device, model = plan.line(), plan.roofline.device, plan.roofline.model
    yield f"{model.name} ({model.family}) on {device.title}: {line['precision']} weights, {line['kv']} cache"
    yield f"budget {plan.budget} tokens a layer, {line['tokens_per_frame']:g} rows a frame, {plan.fps:g} frames a second asked"
    yield ""
    for part in PlannedMemory.__slots__[:6]:
        yield f"  {part:<12}{line[f'{part}_mb']:>10.1f} MB"
    verdict = "fits" if line["fits"] else "does not fit"
    yield f"  {'total':<12}{line['total_mb']:>10.1f} MB: {verdict} in {line['usable_mb']:.0f} MB beside the system"
    build = f", engine build {line['build_peak_mb']:.0f} MB" if line["build_peak_mb"] else ""
    short = ", more than there is: add swap" if line["build_peak_mb"] > line["usable_mb"] else ""
    yield f"  to make it: export {line['export_peak_mb']:.0f} MB{build}{short}"
    yield ""
    parts = f"vision {line['vision_ms']:.1f}, prefill {line['prefill_ms']:.1f}, compression {line['compression_ms']:.2f} ms"
    verdict = "keeps up" if line["keeps_up"] else "does not keep up"
    yield f"  frames      {line['prefill_fps']:>10.2f} a second ({parts}): {verdict}"
    yield f"  answers     {line['ttft_ms']:>10.1f} ms to the first token, then {line['tokens_per_s']:.1f} tokens a second"
    yield f"  energy      {line['j_per_frame']:>10.3f} J a frame at the most ({device['max_watts']} W)"
    yield f"  bound by    {line['bound_by']}"
    if line["largest_budget"]:
        most = f"{line['largest_fps']:.2f} frames a second at this budget"
        yield f"  largest     budget {line['largest_budget']} at this rate; {most}"
    else:
        yield "  largest     no budget fits and keeps up: take a smaller model, fewer --fps or a smaller --precision"


def compare(plan: DevicePlan, request: PlanRequest) -> dict[str, Any]:
    """The plan's total beside what a process took."""
    from edgevlm.apps.planning.measure import measured_bytes

    measured = measured_bytes(plan.roofline.model, request.model, plan.budget, plan.chunk)
    total = plan.memory.total
    return {
        "event": "measured", "planned_mb": round(total / 1e6, 1), "measured_mb": round(measured / 1e6, 1),
        "error": round(total / measured - 1, 4),
    }  # fmt: skip


def show(request: PlanRequest, as_json: bool, measure: bool) -> Iterator[str]:
    """The lines of the command."""
    plan = make_plan(request)
    if measure and not is_measurable(plan.roofline):
        raise UserError("--measure runs demo or a bundle on this CPU as it is; leave --device, --precision and --kv out")
    yield from [json.dumps(plan.line())] if as_json else describe(plan)
    if measure:
        found = compare(plan, request)
        said = f"  measured    {found['measured_mb']:>10.1f} MB: the plan is {100 * found['error']:+.1f} % off"
        yield json.dumps(found) if as_json else said


def is_measurable(roofline: Roofline) -> bool:
    """Whether a process of the model on this CPU is what was planned."""
    model = roofline.model
    made = (model.precision, model.kv) == (roofline.precision, roofline.kv)
    return roofline.device.kind == "cpu" and bool(model.files) and made


def show_published(as_json: bool) -> Iterator[str]:
    """What was published of Orins beside the plan."""
    from edgevlm.apps.planning.published import rows

    if not as_json:
        yield f"{'device':<13}{'model':<15}{'figure':<14}{'published':>10}{'planned':>10}{'error':>10}"
    for row in rows():
        yield json.dumps(row.line()) if as_json else str(row)

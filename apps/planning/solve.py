"""The largest budget and rate that fit, found by bisection on what the plan itself says."""

from __future__ import annotations

from collections.abc import Callable

from edgevlm.apps.planning.memory import Memory, memory_of
from edgevlm.apps.planning.speed import Roofline, Speed, speed_of


def fits(roofline: Roofline, memory: Memory) -> bool:
    """Whether a stream fits beside what the system takes."""
    return memory.total <= roofline.device.usable_bytes


def can_run(roofline: Roofline, budget: int, chunk: int, fps: float) -> bool:
    """Whether a budget fits, memory and the model's positions, and ``fps`` frames a second are kept up with."""
    if not roofline.model.least_budget <= budget <= roofline.model.most_budget:
        return False
    memory = memory_of(roofline.model, roofline.device, roofline.precision, roofline.kv, budget, chunk)
    return fits(roofline, memory) and speed_of(roofline, budget, chunk).prefill_fps >= fps


def largest(least: int, most: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of ``least`` to ``most`` for which ``holds``, true up to some number and never after; or 0."""
    if most < least or not holds(least):
        return 0
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def largest_budget(roofline: Roofline, chunk: int, fps: float) -> int:
    """The largest budget, vision tokens a layer, that can run at ``fps``; 0 if none can."""
    model = roofline.model
    return largest(model.least_budget, model.most_budget, lambda budget: can_run(roofline, budget, chunk, fps))


def bound_by(roofline: Roofline, memory: Memory, speed: Speed) -> str:
    """The term that binds: ``memory size`` of what does not fit, else what takes most of a frame's time."""
    return speed.bound_by if fits(roofline, memory) else "memory size"

"""The memory that a build takes, worked out before it starts."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from edgevlm.errors import UserError
from edgevlm.runtime.cuda.driver import Driver

COPIES = 3.0  # of the weights in the host's memory while an engine is made of them: our allowance, not measured
RUNTIME = 500_000_000  # bytes: a CUDA context with TensorRT's libraries: our allowance, not measured


@dataclass(frozen=True, slots=True)
class BuildNeed:
    """Bytes in the host's memory, and in the device's where that is another."""

    host: int
    device: int


def build_need(weights: int, workspace: int) -> BuildNeed:
    """The peak of building one engine, for ``weights`` bytes of weights and ``workspace`` bytes that a layer may work with.

    host = COPIES * weights + RUNTIME: the weights as they are read from the file, the builder's own copy, and the engine that
    is written. device = weights + workspace: the weights while kernels are timed, and what these work with.
    """
    return BuildNeed(round(COPIES * weights) + RUNTIME, weights + workspace)


def check_memory(name: str, need: BuildNeed, driver: Driver) -> None:
    """Raise UserError, one line that says what to change, where a build of graph ``name`` would not fit in the free memory.

    On a Jetson host and device share their memory, and the host's part may lie in swap.
    """
    free, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    if driver.device.integrated and need.device > free:
        raise UserError(
            f"an engine of {name} takes about {need.device / 1e9:.1f} GB of memory to build that cannot lie in swap, and "
            f"{free / 1e9:.1f} GB are free; close the desktop (sudo init 3), give a lower --workspace, or export with a "
            "smaller --precision"
        )
    if driver.device.integrated:
        short = need.host + need.device > free + swap
        wanted, there = need.host + need.device, free + swap
        where = f"are free, {swap / 1e9:.1f} of them swap"
    elif need.device > (on_device := driver.free_bytes()):
        short, wanted, there, where = True, need.device, on_device, f"are free on {driver.device.name}"
    else:
        short, wanted, there, where = need.host > free + swap, need.host, free + swap, "are free with swap"
    if short:
        raise UserError(
            f"an engine of {name} takes about {wanted / 1e9:.1f} GB to build and {there / 1e9:.1f} GB {where}; add swap, close "
            "the desktop (sudo init 3), give a lower --workspace, or export with a smaller --precision"
        )

"""The plan's memory beside that of a process that runs a bundle until its memory has been compressed."""

from __future__ import annotations

from pathlib import Path

from edgevlm.apps.planning.model import PlannedModel
from edgevlm.errors import UserError
from edgevlm.runtime.helper_process import call_in_helper

STATUS = Path("/proc/self/status")


def measured_bytes(model: PlannedModel, name: str, budget: int, chunk: int) -> int:
    """Return the growth of a process's resident memory, from before it loads ``name`` to its peak with a full memory.

    Frames are noise, one thread. Raises UserError where Linux does not report it, or the run fails.
    """
    if not STATUS.exists():
        raise UserError("--measure needs /proc/self/status, which this system has not; leave it out")
    grids = -(-(budget + budget // 4) // model.tower.rows)
    return int(call_in_helper(f"{__name__}:growth", name, budget, chunk, grids * model.tower.group + chunk))


def growth(name: str, budget: int, chunk: int, frames: int) -> int:
    """Watch ``frames`` frames of noise; returns the bytes by which this process grew since before the model was loaded."""
    import numpy as np

    from edgevlm.engines import onnxruntime_cpu  # noqa: F401  imports count as before
    from edgevlm.runtime.model import Model
    from edgevlm.runtime.session import Session
    from edgevlm.runtime.settings import ALL

    before = _status("VmRSS")
    model = Model.load(name, threads=1)
    noise = np.random.default_rng(0)
    with Session.open(model, budget=budget, chunk=chunk, append=ALL) as session:
        for number in range(frames):
            session.watch(noise.integers(0, 256, (*model.bundle.vision.size, 3), np.uint8), number / 2)
    model.close()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes that Linux reports for this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024

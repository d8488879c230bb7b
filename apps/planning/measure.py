"""The plan's memory beside the memory of a process: a bundle is run, in a process of its own, until it has compressed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from edgevlm.apps.planning.model import PlannedModel
from edgevlm.errors import UserError

STATUS = Path("/proc/self/status")


def measured_bytes(model: PlannedModel, name: str, budget: int, chunk: int) -> int:
    """By how much a process's largest resident memory grew from before it loaded ``name`` until its memory was full.

    Frames are noise, one thread. Raises UserError where the kernel does not tell, or the run fails.
    """
    if not STATUS.exists():
        raise UserError("--measure needs /proc/self/status, which this system has not; leave it out")
    grids = -(-(budget + budget // 4) // model.tower.rows)
    frames = grids * model.tower.group + chunk
    command = [sys.executable, "-m", "edgevlm.apps.planning.measure", name, str(budget), str(chunk), str(frames)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"--measure: {(done.stderr.strip().splitlines() or ['the run ended without a word'])[-1]}")
    found = json.loads(done.stdout)
    return int(found["peak"]) - int(found["before"])


def run(name: str, budget: int, chunk: int, frames: int) -> dict[str, int]:
    """Watch ``frames`` frames of noise: resident bytes before the model was loaded, and the most since then."""
    import numpy as np

    from edgevlm.engines import onnxruntime_cpu  # noqa: F401  what is imported counts before
    from edgevlm.runtime.model import Model
    from edgevlm.runtime.session import Session
    from edgevlm.runtime.settings import ALL

    before = _status("VmRSS")
    model = Model.load(name, threads=1)
    height, width = model.bundle.vision.size
    noise = np.random.default_rng(0)
    with Session.open(model, budget=budget, chunk=chunk, append=ALL) as session:
        for number in range(frames):
            session.watch(noise.integers(0, 256, (height, width, 3), np.uint8), number / 2)
    model.close()
    return {"before": before, "peak": _status("VmHWM")}


def _status(field: str) -> int:
    """Bytes that the kernel says of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], *map(int, sys.argv[2:5]))))

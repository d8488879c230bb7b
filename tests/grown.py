"""How much a process's resident memory grows, from before it loads a bundle to its peak with a full memory."""

import subprocess
import sys


def measured_bytes(model, name, budget, chunk):
    """Frames are noise, one thread."""
    grids = -(-(budget + budget // 4) // model.tower.rows)
    frames = grids * model.tower.group + chunk
    command = [sys.executable, __file__, *map(str, (name, budget, chunk, frames))]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def growth(name, budget, chunk, frames):
    import numpy as np

    from edgevlm.engines import onnxruntime_cpu  # noqa: F401  imports count as before
    from edgevlm.runtime.model import Model
    from edgevlm.runtime.session import Session
    from edgevlm.runtime.settings import ALL

    before = status("VmRSS")
    model = Model.load(name, threads=1)
    noise = np.random.default_rng(0)
    with Session.open(model, budget=budget, chunk=chunk, append=ALL) as session:
        for number in range(frames):
            session.watch(noise.integers(0, 256, (*model.bundle.vision.size, 3), np.uint8), number / 2)
    model.close()
    return status("VmHWM") - before


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    print(growth(sys.argv[1], *map(int, sys.argv[2:])))

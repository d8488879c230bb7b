"""Working memory of the engine: kept from call to call, and given back while the system is short of it.

Measured in a process of its own, in which nothing else has left memory to be used again.
"""

import json
import subprocess
import sys

import numpy as np
import psutil

from edgevlm.runtime.model import Model

MB = 1e6


def measure():
    """Resident bytes after small calls and a large one, then while memory is spared; and whether all small ones agree."""
    model, process = Model.load("demo", threads=1), psutil.Process()
    pixels = np.random.default_rng(0).standard_normal((512, 3, *model.bundle.vision.size), np.float32)

    def rss_after(frames):
        features = model.engine.encode(pixels[:frames])
        return process.memory_info().rss, features

    before, alone = rss_after(1)
    most, _ = rss_after(512)
    kept, _ = rss_after(1)
    model.engine.release_memory(True)
    spared, again = rss_after(1)
    model.engine.release_memory(False)
    _, last = rss_after(1)
    model.close()
    agree = bool((again == alone).all() and (last == alone).all())
    return {"before": before, "most": most, "kept": kept, "spared": spared, "agree": agree}


def test_while_memory_is_short_calls_give_back_what_they_took():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    taken = found["most"] - found["before"]
    assert taken > 30 * MB
    assert found["kept"] - found["before"] > taken / 2, "ONNX Runtime keeps it"
    assert found["spared"] - found["before"] < taken / 2
    assert found["agree"]


if __name__ == "__main__":
    print(json.dumps(measure()))

"""``edgevlm`` with a TensorRT that is not there: ``python faked_build.py VERSION [GRAPH STEP SIGNAL] -- build BUNDLE ...``.

With GRAPH, the process sends itself the signal in that step of that graph's build.
"""

from __future__ import annotations

import os
import signal
import sys

import fake_tensorrt
from fake_cuda import FakeDriver

from edgevlm.__main__ import main
from edgevlm.apps.bundles import build


def run() -> None:
    at = sys.argv.index("--")
    version, *blow = sys.argv[1:at]
    fake_tensorrt.world.version = fake_tensorrt.__version__ = version
    sys.modules["tensorrt"] = fake_tensorrt
    build.open_driver = FakeDriver  # type: ignore[assignment]
    if blow:
        graph, step, number = blow
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests' own parent ignores it
        kill = {(graph, int(step)): lambda: os.kill(os.getpid(), int(number))}
        fake_tensorrt.world.on_step = lambda name, number: kill.get((name, number), lambda: None)()
    sys.argv[1:] = sys.argv[at + 1 :]
    main()


if __name__ == "__main__":
    run()

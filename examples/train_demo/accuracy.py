"""Run `edgevlm bench accuracy` in the world of photographs: `python examples/train_demo/accuracy.py --model BUNDLE`.

Other options are those of `edgevlm bench accuracy`, which runs with one worker.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from edgevlm.bench.commands import accuracy
from edgevlm.calib.accuracy.cases import SUITES
from edgevlm.cli import main
from train_demo.photo_world import PhotoWorld

PHOTO = "streamqa-photo"

if __name__ == "__main__":
    SUITES[PHOTO] = partial(PhotoWorld, unseen=True)
    accuracy.DEMO = (*accuracy.DEMO, PHOTO)
    sys.argv[:] = ["edgevlm", "bench", "accuracy", "--suite", PHOTO, *sys.argv[1:]]
    main()

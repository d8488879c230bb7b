"""A tiny random model of five layers, its checkpoint beside it, and a calibration of made-up numbers."""

import checkpoints
import pytest

from edgevlm.export import export_checkpoint
from edgevlm.runtime.calibration import Calibration
from edgevlm.runtime.model import Model

LAYERS = 5


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    return checkpoints.make_checkpoint(folder / "checkpoint", "llava_onevision", layers=LAYERS, max_positions=512)


@pytest.fixture(scope="session")
def bundle(checkpoint):
    return export_checkpoint(checkpoint, checkpoint.parent / "bundle", kv="fp32")


@pytest.fixture(scope="session")
def model(bundle):
    loaded = Model.load(bundle, threads=1)
    yield loaded
    loaded.close()


@pytest.fixture
def made_up():
    """A calibration that differs from every preset; ``made_up(thresholds=...)`` changes fields."""

    def make(**changes):
        fields = {
            "edgevlm": "0.1.0", "date": "2026-11-21T14:00:00+00:00", "clips": ("a.mp4",), "frames": (10,),
            "questions": ("What happens?",), "cv": (0.5, 0.4, 0.3, 0.2, 0.1), "thresholds": (0.15, 0.25, 0.35),
            "ages": ((0.1,) * 10,) * LAYERS, "recency": (0.1,) * LAYERS, "flat": 0.1, "periodicity": (0.9,) * LAYERS,
            "classes": ("deep",) * LAYERS, "middle_from": 0, "deep_from": 0,
            "agreement": ((None, 0.5, 0.5, 0.5, 0.5),), "clie": 0,
        }  # fmt: skip
        return Calibration(**(fields | changes))

    return make

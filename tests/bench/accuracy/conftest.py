"""The demo model, and planted cases: streams whose objects and questions are made up, so that right results are known."""

import numpy as np
import pytest

from edgevlm.calib.accuracy.cases import Case, CaseQuestion
from edgevlm.runtime.model import Model


@pytest.fixture(scope="session")
def demo():
    loaded = Model.load("demo", threads=1)
    yield loaded
    loaded.close()


@pytest.fixture
def planted():
    """A case of ``frames`` frames of 4 patches: each object stays a while in one patch, and one question is asked of each."""

    def make(seed=0, frames=20, patches=4, objects=5, kind="past_color"):
        rng = np.random.default_rng(seed)
        owners = np.full((frames, patches), -1, np.int32)
        for number in range(objects):
            entered = int(rng.integers(frames - 4))
            owners[entered : entered + int(rng.integers(1, 5)), rng.integers(patches)] = number
        asked = []
        for number in np.unique(owners[owners >= 0]):
            evidence = np.flatnonzero(owners == number)
            asked.append(CaseQuestion(kind, f"what was {number}?", "red", evidence, int(evidence[-1]) // patches))
        return Case(np.zeros((frames, 1, 1, 3), np.uint8), owners, asked)

    return make

"""Every benchmark that runs a model runs it on the engine that is named."""

import pytest

from edgevlm.bench.camera import camera
from edgevlm.bench.memory.longrun import longrun
from edgevlm.bench.memory.snapshot import snapshot
from edgevlm.bench.questions import questions
from edgevlm.bench.stream.growth import growth
from edgevlm.bench.watches import cost, quality
from edgevlm.errors import UserError


@pytest.mark.parametrize("measure", [camera, longrun, snapshot, questions, growth, cost, quality])
def test_the_engine_named_is_loaded(measure):
    with pytest.raises(UserError, match=r"nothing\.py: file not found"):
        list(measure(engine="./nothing.py:Nothing"))

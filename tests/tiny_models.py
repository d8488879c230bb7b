"""Tiny random models, loaded once."""

import checkpoints
import pytest

from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model


@pytest.fixture(scope="session", params=["llava_onevision"])  # of others, where a test names them
def family(request):
    return request.param


@pytest.fixture(scope="session")
def checkpoint(family, tmp_path_factory):
    return checkpoints.make_checkpoint(tmp_path_factory.mktemp(family) / "checkpoint", family, max_positions=2048)


@pytest.fixture(scope="session")
def model(checkpoint):
    loaded = Model.load(export_checkpoint(checkpoint, checkpoint.parent / "bundle", kv="fp32"), threads=1)
    yield loaded
    loaded.close()

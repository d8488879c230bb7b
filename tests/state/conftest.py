"""A tiny random model with layers of every class of HERMES, loaded once."""

import checkpoints
import pytest

from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Ten layers: one shallow, six middle, three deep."""
    folder = tmp_path_factory.mktemp("ten") / "checkpoint"
    checkpoints.make_checkpoint(folder, layers=10, hidden=48, intermediate=64, head_dim=8, max_positions=2048)
    loaded = Model.load(export_checkpoint(folder, folder.parent / "bundle"), threads=1)
    yield loaded
    loaded.close()

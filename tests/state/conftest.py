"""Tiny random models, loaded once: with layers of every class of HERMES, and one of frames in pairs on three axes."""

import checkpoints
import pytest
from more_checkpoints import FRAME, make_more

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


@pytest.fixture(scope="session")
def grouped(tmp_path_factory):
    """Qwen2-VL: its tower merges two frames, its positions have three axes."""
    folder = tmp_path_factory.mktemp("grouped") / "checkpoint"
    make_more(folder, "qwen2_vl", num_hidden_layers=10)
    loaded = Model.load(export_checkpoint(folder, folder.parent / "bundle", camera=FRAME), threads=1)
    yield loaded
    loaded.close()

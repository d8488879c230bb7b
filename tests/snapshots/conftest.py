"""Tiny random models with layers of every class of HERMES, loaded once each."""

import checkpoints
import pytest
from more_checkpoints import FRAME, make_more

from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Ten layers: one shallow, six middle, three deep."""
    folder = tmp_path_factory.mktemp("ten") / "checkpoint"
    checkpoints.make_deep(folder)
    loaded = Model.load(export_checkpoint(folder, folder.parent / "bundle"), threads=1)
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def models(model, tmp_path_factory):
    """By family: ``model``, and those with two frames to a grid on three axes, also by the clock, and with text between."""
    loaded = {"llava": model}
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        folder = tmp_path_factory.mktemp(family) / "checkpoint"
        make_more(folder, family, num_hidden_layers=10)
        loaded[family] = Model.load(export_checkpoint(folder, folder.parent / "bundle", camera=FRAME), threads=1)
    yield loaded
    for family, each in loaded.items():
        if family != "llava":
            each.close()

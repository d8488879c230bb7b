"""The embedded bundle: what it answers, and that it is what our exporter makes of the checkpoint beside it."""

from pathlib import Path

import numpy as np
import pytest

from edgevlm.calib.demo.accuracy import measure, table
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.model import Model, demo_bundle

CHECKPOINT = Path(__file__).parents[3] / "calib" / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def model():
    loaded = Model.load("demo", threads=1)
    yield loaded
    loaded.close()


def test_most_answers_are_right(model):
    right = measure(model, streams=16, frames=64, policy="full", budget=None)
    shares = {kind: float(np.mean(answers)) for kind, answers in right.items()}
    assert np.mean(list(shares.values())) > 0.85, table(right)


@pytest.mark.slow
def test_nine_in_ten_of_every_kind_about_now_and_of_five_about_before(model, capsys):
    right = measure(model, streams=200, frames=64, policy="full", budget=None)
    with capsys.disabled():
        print(f"\n{table(right)}")
    shares = {kind: float(np.mean(answers)) for kind, answers in right.items()}
    assert all(share >= 0.9 for kind, share in shares.items() if is_about_now(kind))
    assert sum(share >= 0.9 for kind, share in shares.items() if not is_about_now(kind)) >= 5


def test_it_is_small():
    assert sum(path.stat().st_size for path in demo_bundle().iterdir()) <= 12e6


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the checkpoint is in the source tree only")
def test_it_is_what_the_exporter_makes_of_the_checkpoint(tmp_path):
    made = export_checkpoint(CHECKPOINT, tmp_path / "bundle")
    ours, shipped = (Bundle.load(folder) for folder in (made, demo_bundle()))
    assert ours.decoder == shipped.decoder
    assert ours.chat == shipped.chat
    for name in ("decoder.weights", "embedding.npy", "tokenizer.json"):
        assert ours.files[name] == shipped.files[name], name

"""The embedded bundle: what it answers, and that it is what our exporter makes of the checkpoint beside it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgevlm.calib.accuracy.compare import compare
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.export import export_checkpoint
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import TowerBuffer, load_engine
from edgevlm.runtime.model import demo_bundle

CHECKPOINT = Path(__file__).parents[3] / "calib" / "demo" / "checkpoint"


def full_kv(streams):
    """How often full KV is right, by kind of question."""
    return {kind: of.value for kind, of in compare(AccuracySettings(seed="7"), [], [], streams).kinds().items()}


def test_most_answers_are_right():
    assert np.mean(list(full_kv(16).values())) > 0.85


@pytest.mark.slow
def test_nine_in_ten_of_every_kind_about_now_and_of_five_about_before(capsys):
    shares = full_kv(200)
    with capsys.disabled():
        print(shares)
    assert all(share >= 0.9 for kind, share in shares.items() if is_about_now(kind))
    assert sum(share >= 0.9 for kind, share in shares.items() if not is_about_now(kind)) >= 5


def test_it_is_small():
    assert sum(path.stat().st_size for path in demo_bundle().iterdir()) <= 12e6


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the checkpoint is in the source tree only")
def test_it_is_what_the_exporter_makes_of_the_checkpoint(tmp_path):
    made = export_checkpoint(CHECKPOINT, tmp_path / "bundle")
    ours, shipped = (Bundle.load(folder) for folder in (made, demo_bundle()))
    assert ours.decoder.graphs.keys() == shipped.decoder.graphs.keys() - {"projections"}  # no longer exported
    assert replace(ours.decoder, graphs={}) == replace(shipped.decoder, graphs={})
    assert ours.chat == shipped.chat
    assert ours.vision.changed == shipped.vision.changed
    for name in ("decoder.weights", "embedding.npy", "tokenizer.json"):
        assert ours.files[name] == shipped.files[name], name


def test_its_graph_of_changed_patches_is_of_its_tower():
    bundle = Bundle.load(demo_bundle())
    engine, memory = load_engine("onnxruntime-cpu", bundle, threads=1), np.zeros(bundle.vision.changed.cache_bytes, np.uint8)
    pixels = np.random.default_rng(0).standard_normal((3, *bundle.vision.size)).astype(np.float32)
    features, tokens = engine.bind_tower(TowerBuffer.of(memory)).encode(pixels, np.arange(16, dtype=np.int32))
    whole = engine.encode(pixels[None])[0]
    assert np.abs(features - whole).max() < 1e-5 * whole.std()
    assert list(tokens) == list(range(16))

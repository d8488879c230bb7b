"""What rounding to integers makes of small differences: per-layer graphs equal the full one; packed otherwise they do not.

Rounding activations (``accuracy_level`` 4) turns a small difference into one of a 127th wherever a number lies between two
codes. A call of other rows, or rows a hundred thousandth away, make small differences; matrices that ONNX Runtime did not pack
are multiplied without that rounding. With level 0 all agree as two computations in float32 do. (In a model as small as this one
last bits seldom meet such a number; what they do to 30 layers is in docs/internals/models.md.)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from checkpoints import make_checkpoint
from runner import Layered, Runner

from edgevlm.engines.inputs import per_layer_files
from edgevlm.engines.onnxruntime_cpu import Calls
from edgevlm.engines.onnxruntime_layers import OnnxRuntimeLayers
from edgevlm.export import export_checkpoint, precisions, profiles
from edgevlm.export.precisions import Layouts

ROWS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("per-layer"), "llava", layers=3, heads=6, kv_heads=2, side=2, vision_layers=1
    )


def logits(checkpoint: Path, folder: Path, level: int, monkeypatch: Any) -> dict[str, np.ndarray]:
    """The same rows: in one call, a hundred thousandth away, one by one, and by layer."""
    layouts = Layouts(*(replace(layout, level=level) for layout in precisions.INT4.onnxruntime))  # type: ignore[type-var]
    monkeypatch.setattr(profiles, "load_precision", lambda name: replace(precisions.INT4, onnxruntime=layouts))
    runner = Runner(export_checkpoint(checkpoint, folder / "bundle", precision="int4"))
    embeds = (np.random.default_rng(4).standard_normal((ROWS, 96)) * 0.3).astype(np.float32)
    tables = runner.tables(np.arange(ROWS, dtype=np.int32))

    def again(rows: np.ndarray) -> np.ndarray:
        runner.past_len[:] = 0
        return runner.decoder.step(rows, *tables, runner.past_len, range(ROWS)).logits

    noise = np.random.default_rng(5).standard_normal(embeds.shape).astype(np.float32)
    found = {"full": again(embeds), "away": again(embeds * (1 + np.float32(1e-5) * noise))}
    runner.past_len[:], runner.position = 0, 0
    found["one by one"] = np.concatenate([runner.step(row[None]).logits for row in embeds])
    spec, none = runner.bundle.decoder, np.zeros(runner.bundle.decoder.layers, np.int32)
    sessions = [unpacked(runner.bundle.file(name)) for name in per_layer_files(runner.bundle)]
    per_layer = {
        "per-layer": runner.engine.bind_layers(runner.buffers),
        "unpacked": OnnxRuntimeLayers(sessions, spec, runner.buffers, Calls()),
    }
    return found | {
        name: Layered(layers, spec.kv_heads).step(embeds, *tables, none, range(ROWS)).logits
        for name, layers in per_layer.items()
    }


def unpacked(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def test_it_is_the_rounding_of_activations(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    level4 = logits(checkpoint, tmp_path / "4", 4, monkeypatch)
    level0 = logits(checkpoint, tmp_path / "0", 0, monkeypatch)

    def differences(found: dict[str, np.ndarray]) -> dict[str, float]:
        return {name: float(np.abs(x - found["full"]).max() / found["full"].std()) for name, x in found.items()}

    rounded, exact = differences(level4), differences(level0)
    print(f"level 4 {rounded}\nlevel 0 {exact}")
    assert max(exact[name] for name in ("one by one", "per-layer", "unpacked")) < 1e-4
    assert rounded["per-layer"] < 1e-4
    assert rounded["away"] > 10 * exact["away"]
    assert max(rounded["one by one"], rounded["away"]) < rounded["unpacked"]
    assert np.abs(level4["unpacked"] - level0["per-layer"]).max() < 1e-4 * level0["per-layer"].std()

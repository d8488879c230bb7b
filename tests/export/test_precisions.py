"""Every graph of a bundle in each precision is the float32 graph over the numbers that the bundle stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from more_checkpoints import FRAME, make_more
from reference_blocks import matrices, with_stored_numbers
from runner import Runner

from edgevlm.export import export_checkpoint, precisions, profiles
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.precisions.layouts import Blocks
from edgevlm.runtime.engine import FramePattern
from edgevlm.runtime.plugins import names

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"family": "llava_onevision", "layers": 2, "heads": 7, "kv_heads": 1, "head_dim": 16, "tied": True, "side": 4},
    "biased": {
        "family": "llava", "tower": "clip", "backbone": "llama", "biases": True, "layers": 2, "heads": 7, "kv_heads": 7,
        "hidden": 112, "head_dim": 16, "intermediate": 100, "side": 3,
    },
    "deepstack": {"family": "qwen3_vl", "hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
}  # fmt: skip
CASES = [
    ("fp16", "tied"),
    ("int8", "biased"),
    ("int4", "tied"),
    ("int4-zp", "biased"),
    ("int4", "deepstack"),
    ("int8", "tied"),
    ("int8", "deepstack"),
]
PREFIX, QUESTION = 5, 4


def checkpoint_of(which: str, folder: Path) -> Path:
    shape = dict(SHAPES[which])
    family = shape.pop("family")
    return (make_more if family == "qwen3_vl" else make_checkpoint)(folder, family, **shape)


def exact(precision: str, monkeypatch: Any) -> None:
    """Let the precision compute in float32, so that what it stores is all that it changes."""
    chosen = precisions.load_precision(precision)

    def of_level_0(layout: Any) -> Any:
        return replace(layout, level=0) if isinstance(layout, Blocks) else layout

    layouts = precisions.Layouts(*map(of_level_0, chosen.onnxruntime))
    monkeypatch.setattr(profiles, "load_precision", lambda name: replace(chosen, onnxruntime=layouts))
    monkeypatch.setattr(GraphBuilder, "for_cpu", property(lambda graph: False, lambda graph, value: None), raising=False)


def in_fp32(checkpoint: Path, out: Path, precision: str) -> Path:
    """The checkpoint in float32, its graphs rotated if those of the precision are."""
    rotated = precisions.FP32.onnxruntime._replace(rotated=precisions.load_precision(precision).onnxruntime.rotated)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "load_precision", lambda name: replace(precisions.FP32, onnxruntime=rotated))
        return export_checkpoint(checkpoint, out, camera=FRAME, kv="fp32")


def frames_and_a_question(runner: Runner) -> np.ndarray:
    """Logits and probes of one course through the graphs: prefix and frame 0, two frames, text row by row."""
    spec, p = runner.bundle.decoder, runner.bundle.vision.tokens_per_frame
    rng = np.random.default_rng(5)

    def rows(count: int, width: int) -> np.ndarray:
        return (rng.standard_normal((count, width)) * 0.3).astype(np.float32)

    logits = [runner.step(rows(PREFIX + p, spec.hidden), range(PREFIX + p)).logits]
    for frame in (1, 2):
        pattern, decoder = None, None
        if "st-spattn" in spec.graphs:
            previous = np.full((spec.layers, spec.kv_heads, p), -1, np.int64)
            previous += (frame - 1) * (PREFIX + p + 1 + np.arange(p))
            pattern, decoder = FramePattern(PREFIX + p, previous), runner.engine.bind(runner.buffers, sparse=True)
        logits.append(runner.step(rows(p, spec.row_width), range(p), decoder, pattern).logits)
    logits += [runner.step(rows(1, spec.hidden)).logits for _ in range(QUESTION)]
    found = np.concatenate(logits)
    return (found / float(found.std())).reshape(-1)


@pytest.mark.parametrize(("precision", "which"), CASES)
def test_every_graph_computes_with_the_stored_numbers(tmp_path: Path, monkeypatch: Any, precision: str, which: str) -> None:
    checkpoint = checkpoint_of(which, tmp_path / "checkpoint")
    plain = export_checkpoint(checkpoint, tmp_path / "plain", camera=FRAME, kv="fp32")
    same = in_fp32(checkpoint, tmp_path / "same", precision)
    np.testing.assert_allclose(*(frames_and_a_question(Runner(bundle, 128)) for bundle in (same, plain)), atol=1e-4)
    exact(precision, monkeypatch)
    rounded = export_checkpoint(checkpoint, tmp_path / "rounded", camera=FRAME, precision=precision, kv="fp32")
    wanted = Runner(with_stored_numbers(same, rounded, tmp_path / "wanted"), 128)
    runner = Runner(rounded, 128)
    assert runner.bundle.decoder.precision == precision
    assert Runner(plain).bundle.decoder.precision == "fp32"
    found, expected = frames_and_a_question(runner), frames_and_a_question(wanted)
    error, change = (np.abs(x - expected).max() for x in (found, frames_and_a_question(Runner(plain, 128))))
    print(f"{precision} {which}: {error:.1e} from the stored numbers, which are {change:.1e} from the checkpoint's")
    assert error < 1e-3
    assert change > 10 * error

    ids = np.arange(0, runner.bundle.decoder.vocab, 7)
    table = matrices(rounded, runner.bundle.decoder.graphs["full"])["head"]
    tied = SHAPES[which].get("tied")
    if tied:
        np.testing.assert_allclose(runner.engine.embed(ids), table[ids], rtol=1e-6)
    bits = {"fp16": 2e-3, "int8": 2e-2, "int4": 2e-2, "int4-zp": 2e-2}[precision]
    assert np.abs(runner.engine.embed(ids) - wanted.engine.embed(ids)).max() <= (0 if tied else bits) + 1e-6


def test_a_tied_embedding_is_stored_once_and_every_bundle_is_smaller(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("tied", tmp_path / "checkpoint")
    sizes = {}
    for precision in names("precisions", own=True):
        bundle = export_checkpoint(checkpoint, tmp_path / precision, precision=precision)
        sizes[precision] = sum(path.stat().st_size for path in bundle.glob("decoder.weights"))
        vocab, hidden = Runner(bundle).bundle.decoder.vocab, 96
        each = {"fp32": 4, "fp16": 2}.get(precision, 1)
        assert (bundle / "embedding.npy").stat().st_size == each * vocab * hidden + 128
        assert (bundle / "embedding-scales.npy").exists() == precision.startswith("int")
    assert sizes["int4"] < sizes["int4-zp"] < sizes["int8"] < sizes["fp16"] < sizes["fp32"]

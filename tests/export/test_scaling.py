"""Activation-aware scaling: the same model before rounding, nearer to it after, and plain rounding where that is better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint

from edgevlm.calib.activations import ROWS, SITES, sample_activations
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.backbones import text_backbone
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions.layouts import Blocks
from edgevlm.export.scaling import ALPHAS, best_scales, in_blocks, scaled
from edgevlm.export.writer import _decoder_shape
from edgevlm.runtime.bundle import Bundle

LAYOUT = Blocks(4)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def outputs(w: Any, x: np.ndarray) -> list[np.ndarray]:
    """What a layer's matrices make of rows already divided by their root mean square, float64, without attention."""
    w64 = {name: np.asarray(getattr(w, name), np.float64) for name in ("input_norm", "qkv", "mlp_norm", "gate_up", "down")}
    gate, up = np.split((x * w64["mlp_norm"]) @ w64["gate_up"].T, 2, axis=1)
    return [(x * w64["input_norm"]) @ w64["qkv"].T, (silu(gate) * up) @ w64["down"].T]


@pytest.fixture(scope="module")
def layer(tmp_path_factory: Any) -> Any:
    folder = make_checkpoint(tmp_path_factory.mktemp("scaling"), "llava", layers=1, heads=6, kv_heads=2, scale=1.0)
    checkpoint = Checkpoint(folder)
    backbone, shape = _decoder_shape(checkpoint)
    assert backbone is text_backbone("qwen2")
    return backbone.layer(checkpoint, shape, 0)


def samples(w: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of which a few columns are thirty times the others."""
    rng = np.random.default_rng(seed)

    def rows(width: int) -> np.ndarray:
        loud = np.where(np.arange(width) % 16 == 3, 30.0, 1.0)
        return (rng.standard_normal((64, width)) * loud).astype(np.float32)

    return {"layer0.qkv": rows(96), "layer0.gate_up": rows(96), "layer0.down": rows(w.down.shape[1])}


def test_the_layer_computes_as_before(layer: Any) -> None:
    x = np.random.default_rng(1).standard_normal((9, 96))
    changed = scaled(layer, 0, samples(layer), LAYOUT)
    for one, two in zip(outputs(layer, x), outputs(changed, x), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5 * np.abs(one).max())
    assert not np.allclose(changed.qkv, layer.qkv)
    assert changed.output is layer.output


def test_what_is_lost_is_less_than_by_plain_rounding(layer: Any) -> None:
    x = samples(layer, seed=2)["layer0.qkv"].astype(np.float64)
    scales = best_scales(layer.qkv, samples(layer)["layer0.qkv"], LAYOUT)
    wanted = x @ layer.qkv.T.astype(np.float64)

    def loss(rounded: np.ndarray) -> float:
        return float(np.square(x @ rounded.T - wanted).mean())

    plain, ours = loss(LAYOUT.rounded(layer.qkv)), loss(LAYOUT.rounded(layer.qkv * scales) / scales)
    print(f"mean square error {plain:.2e} plain, {ours:.2e} scaled")
    assert ours < 0.7 * plain


def test_plain_rounding_is_among_what_is_tried() -> None:
    rng = np.random.default_rng(3)
    weight, x = rng.standard_normal((24, 64)).astype(np.float32), np.ones((8, 64), np.float32)
    np.testing.assert_array_equal(best_scales(weight, x, LAYOUT), np.ones(64, np.float32))
    assert ALPHAS[0] == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_only_whole_numbers_are_scaled_for(precision: str) -> None:
    with pytest.raises(UserError, match=rf"not for {precision}; give --precision int4"):
        in_blocks(precision)


def test_tensorrts_blocks_are_scaled_for_too() -> None:
    layout = in_blocks("int4", "tensorrt-10.3")
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((24, 128)).astype(np.float32), rng.standard_normal((64, 128)).astype(np.float32)
    x[:, 5] *= 40
    scales = best_scales(weight, x, layout)
    losses = [np.square(x @ (layout.rounded(weight * s) / s - weight).T).sum() for s in (scales, np.ones(128, np.float32))]
    assert losses[0] < losses[1] / 2
    with pytest.raises(UserError, match="not for fp16; give --precision int4"):
        in_blocks("fp16", "tensorrt-10.15")


def test_activations_are_sampled_and_the_bundle_says_so(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", layers=2, heads=6, kv_heads=3, head_dim=32)
    found = sample_activations(Bundle.load(made.bundle))
    assert set(found) == {f"layer{layer}.{matrix}" for layer in range(2) for matrix in SITES}
    assert {rows.shape for name, rows in found.items() if "down" not in name} == {(ROWS, 96)}
    assert found["layer1.down"].shape == (ROWS, 128)
    np.testing.assert_array_equal(found["layer0.qkv"], sample_activations(Bundle.load(made.bundle))["layer0.qkv"])
    bundle = Bundle.load(export_checkpoint(made.checkpoint, tmp_path / "out", precision="int4", samples=found))
    assert (bundle.decoder.precision, bundle.decoder.scaling) == ("int4", "awq")
    assert Bundle.load(made.bundle).decoder.scaling is None


def test_sampled_rows_are_the_inputs_of_the_matrices(exported: Any) -> None:
    """By the norm before them: of a first layer they are the embeddings over their root mean square, times its weights."""
    made = exported("llava", layers=2, heads=6, kv_heads=3, head_dim=32)
    checkpoint = Checkpoint(made.checkpoint)
    backbone, shape = _decoder_shape(checkpoint)
    weights = backbone.layer(checkpoint, shape, 0).input_norm
    table = checkpoint.tensor("text.embed_tokens.weight", (shape.vocab, shape.hidden)).astype(np.float64)
    normed = table / np.sqrt(np.square(table).mean(1, keepdims=True) + shape.norm_eps) * weights
    for row in sample_activations(Bundle.load(made.bundle))["layer0.qkv"][:8].astype(np.float64):
        assert np.abs(normed - row).max(1).min() < 5e-3

"""GPTQ: as the paper's equations say column by column, and nearer to the matrix's products than rounding to nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgevlm.calib.activations import SITES, TOKENS, sample_activations
from edgevlm.export import export_checkpoint
from edgevlm.export.decoder import hessian
from edgevlm.export.precisions import rounding
from edgevlm.export.precisions.layouts import Blocks
from edgevlm.export.profiles import rounded_layout
from edgevlm.runtime.bundle import Bundle


def reference(weight: np.ndarray, second: np.ndarray, size: int, grid: Any, span: tuple[int, int]) -> np.ndarray:
    """Codes by Optimal Brain Quantization in the order of columns (arXiv 2210.17323, eqs. 2 and 3), float64."""
    left, codes = weight.astype(np.float64), np.empty(weight.shape)
    inverse = np.linalg.inv(second + rounding.DAMPING * np.diag(second).mean() * np.eye(len(second)))
    for column in range(weight.shape[1]):
        if column % size == 0:
            scale, zero = grid(left[:, column : column + size].astype(np.float32))
        codes[:, column] = np.clip(np.rint(left[:, column] / scale) + zero, *span)
        error = left[:, column] - (codes[:, column] - zero) * scale
        left -= np.outer(error / inverse[column, column], inverse[column])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


def rows(width: int, seed: int, count: int = 400) -> np.ndarray:
    """Rows whose columns go together."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, width // 4)) @ np.random.default_rng(9).standard_normal((width // 4, width))).astype(
        np.float32
    )


@pytest.mark.parametrize("size", [32, 48, 300])
def test_codes_are_the_references(size: int) -> None:
    """In blocks that columns are rounded together of, in ones across those, and in one for all."""
    weight = np.random.default_rng(0).standard_normal((7, 300)).astype(np.float32)
    second = hessian(rows(300, 1))

    def grid(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rounding.best_grid(block, 4, True)

    codes, _, _ = rounding.gptq(weight, second, size, grid, (0, 15))
    expected = reference(weight, second.astype(np.float64), size, grid, (0, 15))
    assert (codes == expected).mean() > 0.98  # a number between two codes may go either way, and those after it with it
    assert np.isin(codes, np.arange(16)).all()


def test_the_grid_is_the_best_of_those_tried() -> None:
    blocks = np.random.default_rng(1).standard_normal((50, 32)).astype(np.float32)
    for with_zeros in (False, True):
        found, zeros = rounding.best_grid(blocks, 4, with_zeros)
        tried = [error_of(blocks, *rounding.block_grid(blocks, 4, with_zeros, ratio)) for ratio in rounding.CLIP_RATIOS]
        np.testing.assert_allclose(error_of(blocks, found, zeros), np.min(tried, 0), rtol=1e-4)


def error_of(blocks: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    codes = np.clip(np.rint(blocks / scales[:, None]) + zeros[:, None].astype(np.float64), 0, 15)
    return np.square((codes - zeros[:, None]) * scales[:, None] - blocks).sum(1)


@pytest.mark.parametrize(
    ("precision", "profile", "share"),
    [
        ("int4", "onnxruntime", 0.5), ("int4-zp", "onnxruntime", 0.5), ("int8", "onnxruntime", 0.7),
        ("int4", "tensorrt-10.3", 0.5), ("int8", "tensorrt-10.3", 0.7),
    ],
)  # fmt: skip
def test_products_lose_less_than_by_rounding_to_nearest(precision: str, profile: str, share: float) -> None:
    layout = rounded_layout(precision, profile)
    weight = np.random.default_rng(2).standard_normal((24, 160)).astype(np.float32)
    second = hessian(rows(160, 3))
    x = rows(160, 4).astype(np.float64)

    def loss(parts: Any) -> float:
        return float(np.square(x @ (numbers(layout, parts, 160) - weight).T).mean())

    nearest, ours = loss(layout.parts(weight)), loss(layout.parts(weight, second))
    print(f"{precision}, {profile}: mean square error {nearest:.2e} to nearest, {ours:.2e} by GPTQ")
    assert ours < share * nearest


def numbers(layout: Any, parts: Any, width: int) -> np.ndarray:
    """What is stored, ``[out, in]``."""
    codes, scales = np.asarray(parts["codes"]), np.asarray(parts["scales"], np.float64)
    if not isinstance(layout, Blocks):
        codes = codes.astype(np.int8).astype(np.float64).T
        return codes * (scales[:, None] if scales.ndim == 1 else np.repeat(scales.T, width // len(scales), 1))
    if layout.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)
    zero: Any = float(1 << (layout.bits - 1))
    if layout.with_zeros:
        zero = np.stack([parts["zeros"] & 15, parts["zeros"] >> 4], -1).reshape(len(codes), -1)[:, : codes.shape[1], None]
    return ((codes - np.float64(zero)) * scales[..., None]).reshape(len(codes), -1)[:, :width]


def test_activations_are_sampled_and_the_bundle_says_so(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", layers=2, heads=6, kv_heads=3, head_dim=32)
    found = sample_activations(Bundle.load(made.bundle))
    assert set(found) == {f"layer{layer}.{matrix}" for layer in range(2) for matrix in SITES}
    widths = {"qkv": 96, "output": 192, "gate_up": 96, "down": 128}
    assert {name: array.shape for name, array in found.items()} == {
        f"layer{layer}.{matrix}": (TOKENS, width) for layer in range(2) for matrix, width in widths.items()
    }
    np.testing.assert_array_equal(found["layer0.qkv"], sample_activations(Bundle.load(made.bundle))["layer0.qkv"])
    bundle = Bundle.load(export_checkpoint(made.checkpoint, tmp_path / "out", precision="int4", samples=found))
    assert (bundle.decoder.precision, bundle.decoder.rounding) == ("int4", "gptq")
    assert Bundle.load(made.bundle).decoder.rounding == "nearest"

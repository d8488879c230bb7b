"""Products of integers as we store them against float64: any width, any block, exact and rounded, with and without VNNI."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto
from reference_blocks import matrices, rounded_rows

from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.precisions import Layout, Stored
from edgevlm.export.precisions.layouts import Blocks, Dense, RowsByColumns
from edgevlm.export.precisions.rounding import block_grid, nearest

LAYOUTS = [
    Blocks(4),
    Blocks(4, with_zeros=True),
    Blocks(4, 16, with_zeros=True),
    Blocks(4, 128),
    Blocks(8),
    Blocks(8, 64, with_zeros=True),
]
WIDTHS = (32, 40, 100, 128, 300)  # of which two are no multiple of a block


def product(folder: Path, layout: Layout, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What ONNX Runtime makes of ``x [.., S, K]`` and a stored weight, ``[.., S, N]``."""
    written(folder, layout, weight, x)
    session = ort.InferenceSession(str(folder / "g.onnx"), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": x})[0]
    return found


def written(folder: Path, layout: Layout, weight: np.ndarray, x: np.ndarray, for_cpu: bool = True) -> None:
    with (folder / "w").open("wb") as stream:
        g = GraphBuilder("product", WeightsFile(stream, "w"))
        g.for_cpu, sizes = for_cpu, [*x.shape[:-2], "S"]
        g.input("x", TensorProto.FLOAT, [*sizes, weight.shape[1]])
        g.output(Stored.of(layout, weight).multiply(g, "y", "x"), TensorProto.FLOAT, [*sizes, weight.shape[0]])
    g.save(folder / "g.onnx")


def random(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    found: np.ndarray = np.random.default_rng([seed, rows, columns]).standard_normal((rows, columns)).astype(np.float32)
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_product_is_that_of_the_stored_numbers(tmp_path: Path, layout: Blocks, width: int) -> None:
    weight, x = random(12, width), random(5, width, 1)
    exact = Blocks(layout.bits, layout.size, layout.with_zeros, level=0)
    found = product(tmp_path, exact, weight, x)
    stored = matrices(tmp_path, "g.onnx")["y"]
    assert stored.shape == weight.shape
    np.testing.assert_allclose(found, x @ stored.T, atol=2e-5 * np.sqrt(width))

    rounded = product(tmp_path, layout, weight, x)
    np.testing.assert_allclose(rounded, rounded_rows(x, layout.size) @ stored.T, atol=2e-5 * np.sqrt(width))
    assert np.abs(rounded - found).max() > 1e-3  # so that the levels do differ


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest_code(bits: int) -> None:
    weight = random(7, 96)
    for with_zeros in (False, True):
        codes, scales, zeros = nearest(weight, 32, partial(block_grid, bits=bits, with_zeros=with_zeros), (0, (1 << bits) - 1))
        codes, scales = codes.reshape(7, 3, 32), scales[..., None]
        error = np.abs((codes - zeros[..., None]) * scales - weight.reshape(7, 3, 32)) / np.abs(scales)
        clipped = codes == (1 << bits) - 1
        assert error[~clipped].max() <= 0.5 + 1e-3
        assert error.max() <= 1 + 1e-3


@pytest.mark.parametrize("layout", [Dense(np.float16), Dense(np.float16, by_row=True)], ids=str)
def test_float16_is_stored_rounded_and_computed_in_float32(tmp_path: Path, layout: Layout) -> None:
    weight, x = random(12, 100), random(5, 100, 1)
    found = product(tmp_path, layout, weight, x)
    stored = weight.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(found, x @ stored.T, atol=1e-4)
    assert np.abs(found - x @ weight.T).max() > 1e-4
    assert (tmp_path / "w").stat().st_size == 2 * weight.size


def columns_of(weight: np.ndarray) -> np.ndarray:
    """What is stored of ``weight [out, in]``, float64."""
    parts = RowsByColumns().parts(weight)
    found: np.ndarray = (parts["codes"] * parts["scales"].astype(np.float64)).T
    assert np.abs(found - weight).max() <= np.abs(weight).max() / 128
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_times_columns_is_the_product_of_rounded_rows(tmp_path: Path, rows: int, width: int) -> None:
    weight, x = random(12, width), random(rows, width, 1)
    x[0] *= 0 if rows > 1 else 1e3  # a row's scale is its own
    stored, found = columns_of(weight), product(tmp_path, RowsByColumns(), weight, x[None])[0]
    step = np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(127), 1e-30)
    np.testing.assert_allclose(found, np.rint(x / step) * step @ stored.T, rtol=1e-5, atol=1e-5 * np.sqrt(width))
    written(tmp_path, RowsByColumns(), weight, x[None], for_cpu=False)
    assert set(matrices(tmp_path, "g.onnx")) == {"y"}
    np.testing.assert_array_equal(matrices(tmp_path, "g.onnx")["y"], stored)


IN_QEMU = """
import sys, numpy as np, onnxruntime as ort
for setting in "01":
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", setting)
    session = ort.InferenceSession(sys.argv[1] + "/g.onnx", options, providers=["CPUExecutionProvider"])
    np.save(sys.argv[1] + "/" + setting, session.run(None, {"x": np.load(sys.argv[1] + "/x.npy")})[0])
"""


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64 (Debian: apt install qemu-user)")
def test_without_vnni_nothing_overflows(tmp_path: Path) -> None:
    """Rows and columns whose every product is as large as can be: pairs of them do not fit in 16 bits."""
    weight, x = np.sign(random(16, 256)), np.sign(random(8, 256, 1))[None]
    written(tmp_path, RowsByColumns(), weight, x)
    np.save(tmp_path / "x", x)
    qemu = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", IN_QEMU, str(tmp_path)]
    subprocess.run(qemu, check=True, capture_output=True)
    overflowing, found = (np.load(tmp_path / f"{setting}.npy") for setting in "01")
    np.testing.assert_allclose(found, x @ columns_of(weight).T, rtol=1e-5, atol=1e-3)
    assert np.abs(overflowing - found).max() > 1

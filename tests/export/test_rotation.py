"""Rotations are orthogonal, the graph's are numpy's, and one channel's outlier ends up small in all."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from edgevlm.errors import UserError
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.rotation import Rotation

WIDTHS = (7, 32, 96, 576, 896)


def rotated_in_graph(folder: Path, rotation: Rotation, rows: np.ndarray) -> list[np.ndarray]:
    """``rows @ R`` and ``rows @ R @ R.T``."""
    with (folder / "w").open("wb") as stream:
        g = GraphBuilder("rotation", WeightsFile(stream, "w"))
        g.input("x", TensorProto.FLOAT, ["n", "m", rows.shape[-1]])
        turned = rotation.nodes(g, "turned", "x")
        for name in (turned, rotation.nodes(g, "back", turned, inverse=True)):
            g.output(name, TensorProto.FLOAT, ["n", "m", rows.shape[-1]])
    g.save(folder / "g.onnx")
    session = ort.InferenceSession(str(folder / "g.onnx"), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": rows})
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [Rotation.of, Rotation.blocks])
def test_a_rotation_is_orthogonal_and_the_same_in_a_graph(tmp_path: Path, make, width: int) -> None:  # type: ignore[no-untyped-def]
    rotation = make(width)
    matrix = rotation.rows(np.eye(width, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=2e-6)
    rows = np.random.default_rng(0).standard_normal((2, 3, width)).astype(np.float32)
    turned, back = rotated_in_graph(tmp_path, rotation, rows)
    np.testing.assert_allclose(turned, rows @ matrix, atol=1e-5)
    np.testing.assert_allclose(back, rows, atol=1e-5)


def test_a_width_whose_matrix_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(UserError, match="rows of 65521 numbers"):
        Rotation.of(65521)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_an_outlier_is_spread_over_all_channels(width: int) -> None:
    matrix = Rotation.of(width).rows(np.eye(width, dtype=np.float32))
    assert np.abs(matrix).max() <= 2 / np.sqrt(width)
    assert np.abs(matrix.sum(0)).max() < 0.6 * np.sqrt(width)  # neither does a row of equal numbers end in one channel

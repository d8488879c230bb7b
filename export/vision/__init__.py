"""What all vision towers have in common, and how one is written."""

from __future__ import annotations

from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import GraphBuilder, WeightsFile, external_tensor, flush
from edgevlm.export.vision.changed import GRAPH as CHANGED
from edgevlm.export.vision.changed import ChangedGraph
from edgevlm.export.vision.layers import Float32, VisionGraph

GRAPH, WEIGHTS = "vision.onnx", "vision.weights"
PRECISIONS = ("fp32", "int8")  # of towers for ONNX Runtime


class VisionTower:
    """Pixels ``[G, group * 3, H, W]`` to language-space rows ``[G, tokens, width]``, one frame group after another.

    size: (height, width) of a frame in pixels. is_sized: other sizes can be had of one graph. group: frames that a tower merges
    into one. patch_grid: (rows, columns). class_tokens: rows ahead of those of patches. reach: not 0 where a row of tokens is
    made of a row of patches, ``[rows of tokens, rows of patches]``, and the same of columns; None where patches are tokens.
    :meth:`add_nodes` is a family's own.
    """

    size: tuple[int, int]
    is_sized: bool = False
    group: int = 1
    tokens: int
    width: int
    patch_grid: tuple[int, int]
    class_tokens: int = 0
    head_dim: int
    reach: tuple[Float32, Float32] | None = None

    def patch_order(self, graph: VisionGraph) -> NDArray[np.int64]:
        """The patches, numbered row by row of a frame, in the order of the tower's rows."""
        return np.arange(self.patch_grid[0] * self.patch_grid[1])

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        """Build the tower; returns the tensor of its rows. Raises UserError if the checkpoint lacks what it takes."""
        raise NotImplementedError


def write_vision(
    tower: VisionTower,
    checkpoint: Checkpoint,
    folder: Path,
    precision: str = "fp32",
    standard: bool = False,
    *,
    fixed: bool | None = None,
    changed: bool = False,
) -> dict[str, Any] | None:
    """Write ``vision.onnx`` and ``vision.weights``, for any number of frame groups; weights are read one tensor at a time.

    precision: of its linears, fp32, fp16 (which needs ``standard``) or int8. standard: without nodes of ONNX Runtime's own;
    then attention is in the precision too. fixed: for frames of the tower's size alone, which is all that most towers take;
    unless given, as ``standard``. changed: also ``vision-changed.onnx``, of the same weights and for that size alone; returns
    what :class:`edgevlm.runtime.bundle.ChangedTowerSpec` says of it, as JSON.
    """
    with (folder / WEIGHTS).open("wb") as stream:
        weights = WeightsFile(stream, WEIGHTS)
        graph = GraphBuilder("vision", weights)
        _build(tower, VisionGraph(graph, checkpoint, precision, standard, standard if fixed is None else fixed))
        spec = _write_changed(tower, checkpoint, folder, weights, precision, standard) if changed else None
        flush(stream)
    graph.save(folder / GRAPH)
    return spec


def _write_changed(
    tower: VisionTower, checkpoint: Checkpoint, folder: Path, weights: WeightsFile, precision: str, standard: bool
) -> dict[str, Any]:
    graph = GraphBuilder("vision-changed", weights)
    kv = (
        "fp16" if precision == "fp16" else "fp32"
    )  # on a CPU, turning all of them to fp32 in each call costs more than it saves
    g = ChangedGraph(graph, checkpoint, precision, standard, grid=tower.patch_grid, kv=kv)
    rows = tower.add_nodes(g, g.start(tower))
    graph.output(g.reshape("features", rows, -1, tower.width), TensorProto.FLOAT, ["t", tower.width])
    graph.save(folder / CHANGED)
    shape = {"layers": g.layers, "heads": g.heads, "head_dim": g.head_dim, "positions": g.count + g.class_tokens}
    return {"graph": CHANGED, "grid": list(g.grid), **shape, "outputs": g.outputs, "kv": g.kv}


def count_parameters(tower: VisionTower, checkpoint: Checkpoint) -> int:
    """Numbers that a tower stores. Raises UserError if the checkpoint lacks one of its tensors; none is read."""
    counting = CountingFile()
    _build(tower, VisionGraph(GraphBuilder("vision", counting), checkpoint.without_reading(), fixed=False))
    return counting.numbers


def check_precision(name: str) -> None:
    """Raises UserError for a precision that towers for ONNX Runtime do not have."""
    if name not in PRECISIONS:
        raise UserError(f"--vision-precision {name!r} is not known; there is {' and '.join(PRECISIONS)}")


def _build(tower: VisionTower, g: VisionGraph) -> None:
    g.fixed |= not tower.is_sized
    size = tower.size if g.fixed else ("H", "W")
    pixels = g.graph.input("pixel_values", TensorProto.FLOAT, ["F", 3 * tower.group, *size])
    rows = tower.add_nodes(g, pixels)
    tokens = tower.tokens if g.fixed else "T"
    g.graph.output(g.node("Identity", [rows], "features"), TensorProto.FLOAT, ["F", tokens, tower.width])


class CountingFile(WeightsFile):
    """Counts what would be written."""

    def __init__(self) -> None:
        super().__init__(BytesIO(), WEIGHTS)
        self.numbers = 0

    def _append(self, name: str, shape: Any, dtype: Any, slices: Any) -> TensorProto:
        self.numbers += prod(shape)
        return external_tensor(name, self.name, TensorProto.FLOAT, shape, 0, 0)

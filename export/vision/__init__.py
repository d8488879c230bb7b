"""The base class of vision towers, and the writer of their graphs."""

from __future__ import annotations

from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import GraphBuilder, WeightsFile, flush
from edgevlm.export.rotation import MeanKeeping
from edgevlm.export.vision.layers import ChangedGraph, Float32, VisionGraph

GRAPH, CHANGED, WEIGHTS = "vision.onnx", "vision-changed.onnx", "vision.weights"


class Tower:
    """A vision tower, which turns pixels into rows for the decoder. Families implement :meth:`add_nodes`.

    Pixels are ``[G, group * 3, H, W]``, and rows are ``[G, tokens, width]``. ``size``: a frame's (height, width) in pixels.
    ``is_sized``: whether frames of other sizes are also accepted. ``group``: how many frames are encoded together.
    ``patch_grid``: how many (rows, columns) of patches a frame is cut into. ``class_tokens``: how many rows of class tokens
    come before the patches. ``reach``: two matrices that show which patches a token depends on,
    ``[rows of tokens, rows of patches]`` and ``[columns of tokens, columns of patches]``, or None if each patch is a token.
    ``residual``: the width of the residual stream, which is rotated if linears are int8; 0 for no rotation. The rotation works
    only if :meth:`add_nodes` passes ``reads`` and ``writes`` to its linears.
    """

    size: tuple[int, int]
    is_sized: bool = False
    group: int = 1
    tokens: int
    width: int
    patch_grid: tuple[int, int]
    class_tokens: int = 0
    head_dim: int
    residual: int = 0
    reach: tuple[Float32, Float32] | None = None

    def patch_order(self, graph: VisionGraph) -> NDArray[np.int64]:
        """Return, for each of the tower's rows, the number of its patch. Patches are numbered row by row in a frame."""
        return np.arange(self.patch_grid[0] * self.patch_grid[1])

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        """Add the tower's nodes and return the tensor of its output rows. Raises UserError if the checkpoint lacks a tensor."""
        raise NotImplementedError


def write_vision(
    tower: Tower,
    checkpoint: Checkpoint,
    folder: Path,
    precision: str = "fp32",
    standard: bool = False,
    *,
    changed: bool = False,
) -> dict[str, Any] | None:
    """Write ``vision.onnx`` and ``vision.weights``, for any number of frame groups. Weights are read one tensor at a time.

    ``precision``: the precision of linears, fp32, fp16 (which needs ``standard``) or int8. ``standard``: the graph uses only
    standard ONNX operators and accepts only one frame size, and attention is computed in the precision of the linears.
    ``changed``: also write ``vision-changed.onnx`` for the tower's frame size, and return its
    :class:`edgevlm.runtime.bundle.ChangedTowerSpec` as JSON values.
    """
    spec = None
    with (folder / WEIGHTS).open("wb") as stream:
        weights = WeightsFile(stream, WEIGHTS)
        graph = GraphBuilder("vision", weights)
        rotation = MeanKeeping.of(tower.residual) if precision == "int8" and tower.residual else None
        _build(tower, VisionGraph(graph, checkpoint, precision, standard, fixed=standard, rotation=rotation))
        if changed:
            builder = GraphBuilder("vision-changed", weights)
            g = ChangedGraph(builder, checkpoint, precision, rotation=rotation, grid=tower.patch_grid)
            rows = g.reshape("features", tower.add_nodes(g, g.start(tower)), -1, tower.width)
            g.graph.output(rows, TensorProto.FLOAT, ["t", tower.width])
            g.graph.save(folder / CHANGED)
            shape = {"layers": g.layers, "heads": g.heads, "head_dim": g.head_dim, "positions": g.count + g.class_tokens}
            spec = {"graph": CHANGED, "grid": list(g.grid), **shape, "outputs": g.outputs, "kv": "fp32"}
        flush(stream)
    graph.save(folder / GRAPH)
    return spec


def check_tensors(tower: Tower, checkpoint: Checkpoint) -> None:
    """Raise UserError if the checkpoint lacks a tensor of the tower. No tensor is read."""
    graph = GraphBuilder("vision", WrittenNowhere(BytesIO(), WEIGHTS))
    _build(tower, VisionGraph(graph, checkpoint.without_reading(), fixed=False))


def _build(tower: Tower, g: VisionGraph) -> None:
    g.fixed |= not tower.is_sized
    size = tower.size if g.fixed else ("H", "W")
    pixels = g.graph.input("pixel_values", TensorProto.FLOAT, ["F", 3 * tower.group, *size])
    rows = tower.add_nodes(g, pixels)
    tokens = tower.tokens if g.fixed else "T"
    g.graph.output(g.node("Identity", [rows], "features"), TensorProto.FLOAT, ["F", tokens, tower.width])


def tower_parameters(tower: Tower, checkpoint: Checkpoint) -> int:
    """Return the number of weights that a tower's graph stores."""
    weights = WrittenNowhere(BytesIO(), WEIGHTS)
    _build(tower, VisionGraph(GraphBuilder("vision", weights), checkpoint, fixed=False))
    return weights.numbers


class WrittenNowhere(WeightsFile):
    """A weights file that counts weights without writing them."""

    numbers = 0

    def _append(self, name: str, shape: Any, kept: Any, slices: Any) -> tuple[Any, ...]:
        self.numbers += prod(shape)
        return name, self.name, TensorProto.FLOAT, shape, 0, 0

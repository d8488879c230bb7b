"""Qwen's vision towers, whose patches span two frames, have rotary positions, and are merged square by square into tokens.

Rotary tables, windows and the order of patches depend on the frame size: a graph computes them unless its frame size is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from edgevlm.export.backbones import inverse_frequencies
from edgevlm.export.vision import Tower
from edgevlm.export.vision.layers import Operand, VisionGraph, Windows

EPSILON = 1e-6
EDGE = 1 << 14  # the most squares along a frame's edge


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """The grid of patches that a frame is cut into. ``rows`` and ``columns``: the number of squares of ``merge`` x ``merge``
    patches along each edge.

    A patch has ``patch`` x ``patch`` pixels and is ``group`` frames deep.
    """

    rows: int
    columns: int
    merge: int
    patch: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows * self.merge, self.columns * self.merge


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """The order in which the tower reads a frame's patches: window by window, and square by square inside a window.

    ``order``: the number of the patch in each of the tower's rows, int64 ``[patches]``. Patches are numbered row by row in the
    frame. ``row`` and ``column``: each patch's row and column in the frame. ``tokens``: the index of each token's square,
    ``[squares]``, or None if the tower reads squares in row-major order.
    """

    order: Operand
    row: Operand
    column: Operand
    tokens: Operand | None
    windows: Windows

    @classmethod
    def of(cls, g: VisionGraph, tall: Operand, wide: Operand, merge: int, side: int = 0) -> PatchLayout:
        """Put ``tall`` x ``wide`` patches in windows of ``side`` x ``side`` squares, or in one window if ``side`` is 0."""
        c = g.compute
        index = c("Range", 0, c("Mul", tall, wide), 1)
        row, column = c("Div", index, wide), c("Mod", index, wide)
        y, x = c("Div", row, merge), c("Div", column, merge)
        digits: list[tuple[Operand, int]] = [(y, EDGE), (x, EDGE)]
        windows: Windows = [(1, c("Mul", tall, wide))]
        if side:
            down, across = c("Div", tall, merge), c("Div", wide, merge)
            before = [
                c("Div", c("Sub", edge, 1), side) for edge in (down, across)
            ]  # how many windows come before the last one along each edge
            starts = [c("Mul", count, side) for count in before]
            last = [c("Sub", edge, start) for edge, start in zip((down, across), starts, strict=True)]
            behind = [c("GreaterOrEqual", at, start) for at, start in zip((y, x), starts, strict=True)]
            is_last = [c("Cast", each, to=TensorProto.INT64) for each in behind]
            digits = [(each, 2) for each in is_last] + [(c("Div", at, side), EDGE) for at in (y, x)]
            digits += [(c("Mod", at, side), side) for at in (y, x)]
            windows = [
                (c("Mul", many, beside), c("Mul", c("Mul", height, width), merge**2))
                for many, height in ((before[0], side), (1, last[0]))
                for beside, width in ((before[1], side), (1, last[1]))
            ]
        key: Operand = 0
        for digit, base in [*digits, (c("Mod", row, merge), merge), (c("Mod", column, merge), merge)]:
            key = c("Add", c("Mul", key, base), digit)
        order, tokens = g.argsort(key), None
        if side:
            first = c("Slice", order, (0,), (EDGE**2,), (0,), (merge**2,))
            tokens = g.argsort(c("Add", c("Mul", c("Gather", y, first), across), c("Gather", x, first)))
        return cls(order, row, column, tokens, _joined(g, windows))


def _joined(g: VisionGraph, windows: Windows) -> Windows:
    joined: Windows = []
    for count, length in windows:
        if not isinstance(count, str) and joined and joined[-1][1] == length:
            joined[-1] = g.compute("Add", joined[-1][0], count), length
        elif isinstance(count, str) or count:
            joined.append((count, length))
    return joined


class QwenTower(Tower):
    """Qwen2-VL's tower, in which a patch attends to all patches of its frame pair.

    ``vision``: the complete ``vision_config``. ``width``: a block's width. ``inner``: the width inside a block's MLP.
    ``hidden``: a token's width.
    """

    is_sized = True
    mlp_names = "fc1", "fc2"
    merger_names = "ln_q", "mlp.0", "mlp.2"

    def __init__(self, grid: PatchGrid, vision: Mapping[str, Any], width: int, inner: int, hidden: int) -> None:
        self.grid, self.group, self.patch_grid = grid, grid.group, grid.shape
        self.size = grid.shape[0] * grid.patch, grid.shape[1] * grid.patch
        self.tokens, self.width, self.hidden, self.joined = grid.rows * grid.columns, hidden, hidden, width * grid.merge**2
        self.columns, self.inner, self.activation = width, inner, str(vision["hidden_act"])
        self.depth, self.heads = int(vision["depth"]), int(vision["num_heads"])
        self.theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 10000.0))
        self.side = 0  # squares along the edge of a window; 0: no windows
        self.head_dim, self.residual = width // self.heads, width
        self.full: set[int] = set()  # blocks without windows
        down, across = (np.repeat(np.eye(edge, dtype=np.float32), grid.merge, 1) for edge in (grid.rows, grid.columns))
        self.reach = down, across

    def patch_order(self, graph: VisionGraph) -> NDArray[np.int64]:
        return np.asarray(PatchLayout.of(graph, *self.grid.shape, self.grid.merge, self.side).order)

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        self.shape: list[Operand] = list(self.grid.shape)
        self.frames: Operand = -1
        if not graph.fixed:
            shape = graph.compute("Shape", pixels)
            self.shape = [graph.compute("Div", graph.compute("Gather", shape, axis), self.grid.patch) for axis in (2, 3)]
            self.frames = graph.compute("Gather", shape, 0)
        self.layout = PatchLayout.of(graph, self.shape[0], self.shape[1], self.grid.merge, self.side)
        rows, delta = self.embed(graph, pixels), ""
        self.tables(graph)
        tapped = []
        for layer in range(self.depth):
            rows, delta = self.block(graph, layer, rows, delta)
            tapped += self.tap(graph, layer, rows, delta)
        tokens = self.merged(graph, "vision.merger", rows, delta)
        return graph.node("Concat", [tokens, *tapped], "vision.tokens", axis=-1) if tapped else tokens

    def embed(self, g: VisionGraph, pixels: str) -> str:
        """Return patch embeddings in the order in which the tower reads them. The shape is ``[G, patches, columns]``."""
        rows = g.patches("vision.patch_embed.proj", pixels, self.columns, self.grid.patch, bias=False, group=self.group)
        return g.reorder("vision.ordered", rows, self.layout.order)

    def block(self, g: VisionGraph, layer: int, rows: str, delta: str) -> tuple[str, str]:
        """Add a block. The block's input is ``rows + delta``, and its output is the sum of the two returned tensors."""
        name = f"vision.blocks.{layer}"
        normed, rows = self.norm(g, f"{name}.norm1", rows, delta)
        attended = self.attention(g, name, normed, [] if layer in self.full else self.layout.windows)
        normed, rows = self.norm(g, f"{name}.norm2", rows, attended)
        return rows, self.mlp(g, name, normed)

    def norm(self, g: VisionGraph, name: str, rows: str, skip: str = "") -> tuple[str, str]:
        return g.layer_norm(name, rows, self.columns, EPSILON, skip)

    def mlp(self, g: VisionGraph, name: str, rows: str) -> str:
        first, second = (f"{name}.mlp.{part}" for part in self.mlp_names)
        inner = g.linear(first, rows, self.columns, self.inner, activation=self.activation, reads=f"{name}.norm2")
        return g.linear(second, inner, self.inner, self.columns, writes=True)

    def merged(self, g: VisionGraph, name: str, rows: str, delta: str) -> str:
        """Norm the patches, and merge each square of patches into one token.

        The tokens are ``[G, squares, hidden]``, in row-major order.
        """
        normed, _ = self.norm(g, f"{name}.{self.merger_names[0]}", rows, delta)
        return self.projected(g, name, self.beside(g, name, normed))

    def beside(self, g: VisionGraph, name: str, rows: str) -> str:
        every = g.reshape(f"{name}.joined", g.kept(f"{name}.kept", rows, self.columns), 0, -1, self.joined)
        return g.chosen(f"{name}.chosen", every, self.layout.tokens)

    def projected(self, g: VisionGraph, name: str, rows: str) -> str:
        norm, first, second = (f"{name}.{part}" for part in self.merger_names)
        inner = g.linear(first, rows, self.joined, self.joined, activation="gelu", reads=norm)
        tokens = g.linear(second, inner, self.joined, self.hidden)
        return tokens if self.layout.tokens is None else g.reorder(f"{name}.tokens", tokens, self.layout.tokens)

    def tap(self, g: VisionGraph, layer: int, rows: str, delta: str) -> list[str]:
        """Return the layer's DeepStack features, each ``[G, squares, hidden]``. Only Qwen3-VL has such features."""
        return []

    def attention(self, g: VisionGraph, name: str, rows: str, windows: Windows) -> str:
        """Add the block's attention, with rotated queries and keys. With ``windows``, attend inside each window."""
        width, name, norm = self.columns, f"{name}.attn", f"{name}.norm1"
        packed = g.linear(f"{name}.qkv", rows, width, 3 * width, reads=norm)
        query, key, value = g.split(f"{name}.parts", packed, [width] * 3)
        parts = [self.rotated(g, f"{name}.turned_query", query), self.rotated(g, f"{name}.turned_key", key), value]
        attended = g.windowed(
            name, parts, windows,
            rows=self.patch_grid[0] * self.patch_grid[1], width=width, heads=self.heads, scale=self.head_dim**-0.5,
            frames=self.frames,
        )  # fmt: skip
        return g.linear(f"{name}.proj", attended, width, width, writes=True)

    def tables(self, g: VisionGraph) -> None:
        """Add tables of cosines and sines. Half of a head's pairs are rotated by the patch's row, and half by its column."""
        half, turned = self.columns // self.heads // 2, list[Operand]()
        inv_freq = inverse_frequencies(self.theta, half)
        for places in (self.layout.row, self.layout.column):
            at = g.compute("Cast", g.compute("Gather", places, self.layout.order), to=TensorProto.FLOAT)
            turned.append(g.compute("Mul", g.compute("Unsqueeze", at, (1,)), inv_freq))
        angles = g.compute("Concat", *turned, axis=1)
        tables = [g.compute(function, angles) for function in ("Cos", "Sin")]
        by_head = [g.compute("Unsqueeze", table, (1,)) if g.standard else table for table in tables]
        named = (g.named(name, table) for name, table in zip(("vision.cos", "vision.sin"), by_head, strict=True))
        self.cos, self.sin = (g.per_position(table) if g.standard else table for table in named)

    def rotated(self, g: VisionGraph, name: str, rows: str) -> str:
        """Rotate each head's halves ``(a, b)`` to ``(a cos - b sin, b cos + a sin)``."""
        if not g.standard:
            return g.graph.fused("RotaryEmbedding", [rows, g.position_ids(), self.cos, self.sin], [name], num_heads=self.heads)
        half = self.columns // self.heads // 2
        heads = g.reshape(f"{name}.by_head", rows, 0, 0, self.heads, 2 * half)
        a, b = g.split(f"{name}.half", heads, [half, half])
        first = g.node("Sub", [g.mul(f"{name}.ac", a, self.cos), g.mul(f"{name}.bs", b, self.sin)], f"{name}.a")
        second = g.add(f"{name}.b", g.mul(f"{name}.bc", b, self.cos), g.mul(f"{name}.as", a, self.sin))
        return g.reshape(name, g.node("Concat", [first, second], f"{name}.turned", axis=-1), 0, 0, -1)


class Qwen25Tower(QwenTower):
    """Qwen2.5-VL's tower: RMS norms, gated MLPs, and windows in blocks that ``fullatt_block_indexes`` does not list."""

    def __init__(self, grid: PatchGrid, vision: Mapping[str, Any], width: int, inner: int, hidden: int) -> None:
        super().__init__(grid, vision, width, inner, hidden)
        self.side = int(vision["window_size"]) // (grid.merge * grid.patch)
        self.full = set(vision["fullatt_block_indexes"])

    def norm(self, g: VisionGraph, name: str, rows: str, skip: str = "") -> tuple[str, str]:
        return g.rms_norm(name, rows, self.columns, EPSILON, skip)

    def mlp(self, g: VisionGraph, name: str, rows: str) -> str:
        norm, name = f"{name}.norm2", f"{name}.mlp"
        gate = g.linear(f"{name}.gate_proj", rows, self.columns, self.inner, activation=self.activation, reads=norm)
        up = g.linear(f"{name}.up_proj", rows, self.columns, self.inner, reads=norm)
        return g.linear(f"{name}.down_proj", g.mul(f"{name}.gated", gate, up), self.inner, self.columns, writes=True)


class Qwen3Tower(QwenTower):
    """Qwen3-VL's tower.

    A row ``[(1 + K) hidden]`` holds a token's embedding, followed by the token's features for K decoder layers.
    """

    mlp_names = "linear_fc1", "linear_fc2"
    merger_names = "norm", "linear_fc1", "linear_fc2"

    def __init__(self, grid: PatchGrid, vision: Mapping[str, Any], width: int, inner: int, hidden: int) -> None:
        super().__init__(grid, vision, width, inner, hidden)
        self.tapped = list(vision["deepstack_visual_indexes"])
        self.width, self.position_count = (1 + len(self.tapped)) * hidden, int(vision["num_position_embeddings"])

    def embed(self, g: VisionGraph, pixels: str) -> str:
        rows = g.patches("vision.patch_embed.proj", pixels, self.columns, self.grid.patch, group=self.group)
        placed = g.add("vision.placed", rows, g.per_patch(g.named("vision.places", self.resampled(g))))
        return g.reorder("vision.ordered", placed, self.layout.order)

    def resampled(self, g: VisionGraph) -> Operand:
        """Return each patch's position embedding, interpolated bilinearly from a square table that spans the whole frame."""
        c, side, name = g.compute, round(self.position_count**0.5), "vision.pos_embed.weight"
        shape = self.position_count, self.columns
        places = g.residual(g.tensor(name, shape))
        table: Operand = places if g.fixed else g.constant(name, places)
        matrices = []  # each of shape [patches along an edge, side]
        for edge in self.shape:
            step = c("Div", np.float32(side - 1), c("Cast", c("Max", c("Sub", edge, 1), 1), to=TensorProto.FLOAT))
            at = c("Mul", c("Cast", c("Range", 0, edge, 1), to=TensorProto.FLOAT), step)
            distance = c("Abs", c("Sub", c("Unsqueeze", at, (1,)), np.arange(side, dtype=np.float32)))
            matrices.append(c("Relu", c("Sub", np.float32(1), distance)))
        lines = c("MatMul", matrices[0], c("Reshape", table, (side, side * self.columns)))
        drawn = c("MatMul", matrices[1], c("Reshape", lines, (-1, side, self.columns)))
        return c("Reshape", drawn, (-1, self.columns))

    def tap(self, g: VisionGraph, layer: int, rows: str, delta: str) -> list[str]:
        """Return the layer's DeepStack features. Unlike in :meth:`merged`, patches are joined before the norm."""
        if layer not in self.tapped:
            return []
        name = f"vision.deepstack_merger_list.{self.tapped.index(layer)}"
        joined = self.beside(g, name, g.add(f"{name}.rows", rows, delta))
        return [self.projected(g, name, g.layer_norm(f"{name}.norm", joined, self.joined, EPSILON)[0])]

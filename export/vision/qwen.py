"""Qwen's vision towers: patches of two frames, rotary positions, merged in squares.

What depends on the size of a frame (rotary tables, windows, the order of patches) is worked out once, for the size that the
bundle is made for, and is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.export.vision import VisionTower
from edgevlm.export.vision.layers import Float32, VisionGraph, bilinear

EPSILON = 1e-6  # of all norms
Int64 = NDArray[np.int64]
Windows = list[tuple[int, int]]  # (how many, patches in each), one after another


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """A frame's patches: ``rows`` x ``columns`` squares of ``merge`` x ``merge`` patches.

    A patch has ``patch`` x ``patch`` pixels and is ``group`` frames deep.
    """

    rows: int
    columns: int
    merge: int
    patch: int
    group: int

    @property
    def squares(self) -> int:
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.rows * self.merge, self.columns * self.merge

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.shape[0] * self.patch, self.shape[1] * self.patch

    def patches(self, squares: Int64) -> Int64:
        """The patches of squares, row by row in each; patches and squares are numbered row by row of the frame."""
        places = np.arange(self.squares * self.merge**2).reshape(self.rows, self.merge, self.columns, self.merge)
        by_square = places.transpose(0, 2, 1, 3).reshape(self.squares, -1)
        return by_square[squares].flatten()

    def windows(self, side: int) -> tuple[Int64, Windows]:
        """Windows of ``side`` x ``side`` squares, those at the edges smaller: the squares' order, and runs of equal windows."""
        squares = np.arange(self.squares).reshape(self.rows, self.columns)
        by_shape: dict[tuple[int, ...], list[Int64]] = {}
        for top in range(0, self.rows, side):
            for left in range(0, self.columns, side):
                window = squares[top : top + side, left : left + side]
                by_shape.setdefault(window.shape, []).append(window.flatten())
        order = np.concatenate([window for alike in by_shape.values() for window in alike])
        return order, [(len(alike), alike[0].size * self.merge**2) for alike in by_shape.values()]


class QwenTower(VisionTower):
    """Qwen2-VL's: every patch sees its whole frame pair.

    vision: ``vision_config``, complete. inner: width of a block's MLP. hidden: of what the tower gives.
    """

    def __init__(self, grid: PatchGrid, vision: Mapping[str, Any], width: int, inner: int, hidden: int) -> None:
        self.grid, self.size, self.group = grid, grid.size, grid.group
        self.tokens, self.width, self.hidden = grid.squares, hidden, hidden
        self.columns, self.inner, self.activation = width, inner, str(vision["hidden_act"])
        self.depth, self.heads = int(vision["depth"]), int(vision["num_heads"])
        self.theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 10000.0))
        self.everything: Windows = [(1, grid.squares * grid.merge**2)]
        self.order, self.windows = np.arange(grid.squares), self.everything
        self.full: set[int] = set()  # blocks that see everything where the others see windows

    def add_nodes(self, graph: VisionGraph, pixels: str) -> str:
        rows, delta = self.embed(graph, pixels), ""
        self.tables(graph)
        tapped = []
        for layer in range(self.depth):
            rows, delta = self.block(graph, layer, rows, delta)
            tapped += self.tap(graph, layer, rows, delta)
        tokens = self.merged(graph, "vision.merger", rows, delta)
        return graph.node("Concat", [tokens, *tapped], "vision.tokens", axis=-1) if tapped else tokens

    def embed(self, g: VisionGraph, pixels: str) -> str:
        """Patch embeddings ``[G, patches, columns]`` in the order of windows, square by square."""
        rows = g.patches("vision.patch_embed.proj", pixels, self.columns, self.grid.patch, bias=False, group=self.group)
        return self.gather(g, "vision.ordered", rows, self.grid.patches(self.order))

    def block(self, g: VisionGraph, layer: int, rows: str, delta: str) -> tuple[str, str]:
        """Pre-norm attention and MLP of ``rows + delta``, returned in the same way."""
        name = f"vision.blocks.{layer}"
        normed, rows = self.norm(g, f"{name}.norm1", rows, delta)
        windows = self.everything if layer in self.full else self.windows
        attended = self.attention(g, f"{name}.attn", normed, windows)
        normed, rows = self.norm(g, f"{name}.norm2", rows, attended)
        return rows, self.mlp(g, f"{name}.mlp", normed)

    def norm(self, g: VisionGraph, name: str, rows: str, skip: str = "") -> tuple[str, str]:
        return g.layer_norm(name, rows, self.columns, EPSILON, skip)

    def mlp(self, g: VisionGraph, name: str, rows: str) -> str:
        inner = g.linear(f"{name}.fc1", rows, self.columns, self.inner, activation=self.activation)
        return g.linear(f"{name}.fc2", inner, self.inner, self.columns)

    def merged(self, g: VisionGraph, name: str, rows: str, delta: str) -> str:
        """A square's patches, normed, to one token, in row-major order again: ``[G, squares, hidden]``."""
        normed, _ = self.norm(g, f"{name}.ln_q", rows, delta)
        return self.projected(g, name, self.joined(g, name, normed), ("mlp.0", "mlp.2"))

    def joined(self, g: VisionGraph, name: str, rows: str) -> str:
        """The patches of each square side by side."""
        return g.reshape(f"{name}.joined", rows, 0, self.grid.squares, -1)

    def projected(self, g: VisionGraph, name: str, rows: str, linears: tuple[str, str]) -> str:
        joined = self.columns * self.grid.merge**2
        inner = g.linear(f"{name}.{linears[0]}", rows, joined, joined, activation="gelu")
        tokens = g.linear(f"{name}.{linears[1]}", inner, joined, self.hidden)
        return self.gather(g, f"{name}.tokens", tokens, np.argsort(self.order))

    def tap(self, g: VisionGraph, layer: int, rows: str, delta: str) -> list[str]:
        """What the tower gives of a layer beside its last one's: ``[G, squares, hidden]`` each."""
        return []

    def attention(self, g: VisionGraph, name: str, rows: str, windows: Windows) -> str:
        """Full attention inside each window, queries and keys rotated."""
        width, heads = self.columns, self.heads
        query, key, value = g.split(f"{name}.parts", g.linear(f"{name}.qkv", rows, width, 3 * width), [width] * 3)
        parts = [self.rotated(g, f"{name}.turned_query", query), self.rotated(g, f"{name}.turned_key", key), value]
        runs: list[Sequence[str]] = [parts]
        if len(windows) > 1:
            sizes = [count * length for count, length in windows]
            runs = list(zip(*(g.split(f"{part}.run", part, sizes, axis=1) for part in parts), strict=True))
        seen = []
        for index, ((count, length), run) in enumerate(zip(windows, runs, strict=True)):
            cut = run if count == 1 else [g.reshape(f"{part}.windows", part, -1, length, width) for part in run]
            at = f"{name}.{index}"
            attended = g.attention(at, *cut, rows=length, heads=heads, scale=(width // heads) ** -0.5)
            seen.append(attended if count == 1 else g.reshape(f"{at}.run", attended, -1, count * length, width))
        joined = seen[0] if len(seen) == 1 else g.node("Concat", seen, f"{name}.seen", axis=1)
        return g.linear(f"{name}.proj", joined, width, width)

    def tables(self, g: VisionGraph) -> None:
        """cos and sin of each patch: half of a head's pairs turn by its row, half by its column."""
        half = self.columns // self.heads // 2
        inv_freq = 1.0 / np.float32(self.theta) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        places = np.stack(np.divmod(self.grid.patches(self.order), self.grid.shape[1]), -1).astype(np.float32)
        angles = (places[..., None] * inv_freq).reshape(len(places), half)
        for name, table in (("vision.cos", np.cos(angles)), ("vision.sin", np.sin(angles))):
            g.constant(name, table[:, None] if g.standard else table)

    def rotated(self, g: VisionGraph, name: str, rows: str) -> str:
        """``(a, b)`` of each head to ``(a cos - b sin, b cos + a sin)``."""
        if not g.standard:
            return g.graph.fused(
                "RotaryEmbedding", [rows, g.integers(0), "vision.cos", "vision.sin"], [name], num_heads=self.heads
            )
        half = self.columns // self.heads // 2
        heads = g.reshape(f"{name}.by_head", rows, 0, 0, self.heads, 2 * half)
        a, b = g.split(f"{name}.half", heads, [half, half])
        first = g.node("Sub", [g.mul(f"{name}.ac", a, "vision.cos"), g.mul(f"{name}.bs", b, "vision.sin")], f"{name}.a")
        second = g.add(f"{name}.b", g.mul(f"{name}.bc", b, "vision.cos"), g.mul(f"{name}.as", a, "vision.sin"))
        return g.reshape(name, g.node("Concat", [first, second], f"{name}.turned", axis=-1), 0, 0, -1)

    def gather(self, g: VisionGraph, name: str, rows: str, order: Int64) -> str:
        """Rows in another order, if it is another."""
        if np.array_equal(order, np.arange(len(order))):
            return rows
        return g.node("Gather", [rows, g.graph.constant(f"{name}.order", order)], name, axis=1)


class Qwen25Tower(QwenTower):
    """Qwen2.5-VL's: blocks but those in ``fullatt_block_indexes`` attend inside windows; RMS norms, gated MLPs."""

    def __init__(self, grid: PatchGrid, vision: Mapping[str, Any], width: int, inner: int, hidden: int) -> None:
        super().__init__(grid, vision, width, inner, hidden)
        self.order, self.windows = grid.windows(int(vision["window_size"]) // (grid.merge * grid.patch))
        self.full = set(vision["fullatt_block_indexes"])

    def norm(self, g: VisionGraph, name: str, rows: str, skip: str = "") -> tuple[str, str]:
        return g.rms_norm(name, rows, self.columns, EPSILON, skip)

    def mlp(self, g: VisionGraph, name: str, rows: str) -> str:
        gate = g.linear(f"{name}.gate_proj", rows, self.columns, self.inner, activation=self.activation)
        up = g.linear(f"{name}.up_proj", rows, self.columns, self.inner)
        return g.linear(f"{name}.down_proj", g.mul(f"{name}.gated", gate, up), self.inner, self.columns)


class Qwen3Tower(QwenTower):
    """Qwen3-VL's: tokens ``[G, squares, (1 + K) hidden]``, the embedding, then what K blocks give to the decoder's first K."""

    def __init__(self, grid: PatchGrid, vision: Mapping[str, Any], width: int, inner: int, hidden: int) -> None:
        super().__init__(grid, vision, width, inner, hidden)
        self.tapped = list(vision["deepstack_visual_indexes"])
        self.width, self.places = (1 + len(self.tapped)) * hidden, int(vision["num_position_embeddings"])

    def embed(self, g: VisionGraph, pixels: str) -> str:
        rows = g.patches("vision.patch_embed.proj", pixels, self.columns, self.grid.patch, group=self.group)
        placed = g.add("vision.placed", rows, g.constant("vision.places", self.resampled(g)))
        return self.gather(g, "vision.ordered", placed, self.grid.patches(self.order))

    def resampled(self, g: VisionGraph) -> Float32:
        """The square table of position embeddings at each patch, bilinear: ``[patches, columns]``."""
        side = round(self.places**0.5)
        table = g.tensor("vision.pos_embed.weight", (self.places, self.columns)).reshape(side, side, -1)
        down, across = (bilinear(side, few, corners=True) for few in self.grid.shape)
        drawn: Float32 = np.einsum("rs,cl,slw->rcw", down, across, table, optimize=True)
        return drawn.reshape(-1, self.columns).astype(np.float32)

    def mlp(self, g: VisionGraph, name: str, rows: str) -> str:
        inner = g.linear(f"{name}.linear_fc1", rows, self.columns, self.inner, activation=self.activation)
        return g.linear(f"{name}.linear_fc2", inner, self.inner, self.columns)

    def merged(self, g: VisionGraph, name: str, rows: str, delta: str) -> str:
        normed, _ = self.norm(g, f"{name}.norm", rows, delta)
        return self.projected(g, name, self.joined(g, name, normed), ("linear_fc1", "linear_fc2"))

    def tap(self, g: VisionGraph, layer: int, rows: str, delta: str) -> list[str]:
        """Normed after the patches of a square are joined, not before."""
        if layer not in self.tapped:
            return []
        name = f"vision.deepstack_merger_list.{self.tapped.index(layer)}"
        joined = self.joined(g, name, g.add(f"{name}.rows", rows, delta))
        normed, _ = g.layer_norm(f"{name}.norm", joined, self.columns * self.grid.merge**2, EPSILON)
        return [self.projected(g, name, normed, ("linear_fc1", "linear_fc2"))]

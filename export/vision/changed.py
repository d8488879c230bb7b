"""A tower's graph for changed patches alone: they go through all layers, and attend to the keys and values of all patches.

A layer's new keys and values are written over those that the patches had (ScatterND, in place where ``key{l}_out`` is bound to
the address of ``key{l}``), and then every query of the call attends to all of them. Patches that did not change keep what they
were last computed as. Where a token is made of several patches, the rows that it is made of are kept in the same way.

Attention inside windows is of the windows that have a changed patch (and of the first of each shape, so that there is one): a
window has as many queries as patches, those of unchanged ones stand for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike
from onnx import TensorProto

from edgevlm.export.graph import tensor_type
from edgevlm.export.vision.layers import Operand, VisionGraph, Windows
from edgevlm.runtime.kv import DTYPES, KVType

if TYPE_CHECKING:
    from edgevlm.export.vision import VisionTower

GRAPH = "vision-changed.onnx"


@dataclass(slots=True)
class ChangedGraph(VisionGraph):
    """Rows are those of changed patches, ``[1, n, width]``; what towers ask for is otherwise that of :class:`VisionGraph`.

    A patch has two numbers: row by row in its frame (input ``patches``), and its position in keys and values, which is that
    of the tower's own order, behind the class tokens.
    """

    grid: tuple[int, int] = (0, 0)
    kv: KVType = "fp32"
    class_tokens: int = 0
    heads: int = 0
    head_dim: int = 0
    layers: int = 0
    outputs: list[int] = field(default_factory=list)
    runs: list[tuple[str, str]] = field(default_factory=list)  # of equal windows: the changed ones, and their queries' rows
    slots: str = ""  # where the rows' queries are among those of windows

    @property
    def count(self) -> int:
        return self.grid[0] * self.grid[1]

    def start(self, tower: VisionTower) -> str:
        """The inputs, where patches are kept and which tokens they are part of; returns the tensor of pixels."""
        pixels = self.graph.input("pixel_values", TensorProto.FLOAT, [1, 3 * tower.group, *tower.size])
        patches = self.graph.input("patches", TensorProto.INT64, ["n"])
        self.class_tokens, self.head_dim = tower.class_tokens, tower.head_dim
        order = tower.patch_order(self)
        if not np.array_equal(order, np.arange(self.count)):
            self.node("Gather", [self.graph.constant("position_of", np.argsort(order)), patches], "positions")
        elif tower.class_tokens:
            first = self.graph.constant("class_tokens", np.arange(tower.class_tokens, dtype=np.int64))
            behind = self.add("positions.patches", patches, self.integers(tower.class_tokens))
            self.node("Concat", [first, behind], "positions", axis=0)
        else:
            self.node("Identity", [patches], "positions")
        self.node("Unsqueeze", ["positions", self.integers(0)], "positions.batch")
        marks = self._scattered("patches.changed", patches, np.float32, self._expanded("patches.ones", patches, np.float32(1)))
        if tower.reach is None:
            self.node("Identity", [patches], "tokens")
        else:
            down, across = ((matrix != 0).astype(np.float32) for matrix in tower.reach)
            parts = [self.graph.constant("reach.down", down), self.reshape("patches.grid", marks, *self.grid)]
            right = self.graph.constant("reach.across", np.ascontiguousarray(across.T))
            found = self.node("MatMul", [self.node("MatMul", parts, "reach.lines"), right], "reach.tokens")
            hit = self.node("NonZero", [self.reshape("reach.all", found, -1)], "reach.nonzero")
            self.reshape("tokens", hit, -1)
        self.graph.output("tokens", TensorProto.INT64, ["t"])
        return pixels

    def patches(self, name: str, pixels: str, width: int, patch: int, *, bias: bool = True, group: int = 1) -> str:
        """The convolution over the changed patches, laid side by side."""
        rows, columns = self.grid
        ends = [self.integers(*numbers) for numbers in ((0, 0), (rows * patch, columns * patch), (2, 3))]
        used = self.node("Slice", [pixels, *ends], f"{name}.used")
        tiles = self.reshape(f"{name}.cut", used, 3 * group, rows, patch, columns, patch)
        squares = self.transpose(f"{name}.squares", tiles, 1, 3, 0, 2, 4)
        flat = self.reshape(f"{name}.flat", squares, self.count, 3 * group * patch * patch)
        some = self.reshape(
            f"{name}.some", self.node("Gather", [flat, "patches"], f"{name}.changed"), -1, 3 * group, patch, patch
        )
        strip = self.reshape(f"{name}.strip", self.transpose(f"{name}.beside", some, 1, 2, 0, 3), 1, 3 * group, patch, -1)
        return VisionGraph.patches(self, name, strip, width, patch, bias=bias, group=group)

    def per_position(self, table: str) -> str:
        return self.node("Gather", [table, "positions"], f"{table}.positions")

    def per_patch(self, table: str) -> str:
        return self.node("Gather", [table, "patches"], f"{table}.patches")

    def position_ids(self) -> str:
        return "positions.batch"

    def reorder(self, name: str, rows: str, order: Operand) -> str:
        """Rows stay in the order of ``patches``, tokens in that of the frame."""
        return rows

    def kept(self, name: str, rows: str, width: int) -> str:
        index, where = len(self.outputs), "patches" if self.class_tokens else "positions"
        self.outputs.append(width)
        past = self.graph.input(f"kept{index}", TensorProto.FLOAT, [self.count, width])
        at = self.node("Unsqueeze", [where, self.integers(1)], f"{name}.at")
        self.node("ScatterND", [past, at, self.reshape(f"{name}.new", rows, -1, width)], f"kept{index}_out")
        self.graph.output(f"kept{index}_out", TensorProto.FLOAT, [self.count, width])
        return self.reshape(name, f"kept{index}_out", 1, self.count, width)

    def chosen(self, name: str, rows: str, order: Operand | None = None) -> str:
        tokens = "tokens"
        if order is not None:
            tokens = self.node("Gather", [self.named("row_of_token", order), tokens], f"{name}.tokens")
        return self.node("Gather", [rows, tokens], name, axis=1)

    def attention(self, name: str, query: str, key: str, value: str, *, rows: int, heads: int, scale: float) -> str:
        keys, values = self._written(key, value, rows, heads, name)
        return self._attended(name, query, keys, values, heads, scale)

    def windowed(
        self, name: str, parts: Sequence[str], windows: Windows, *,
        rows: int, width: int, heads: int, scale: float, frames: Operand,
    ) -> str:  # fmt: skip
        query, key, value = parts
        runs = [(int(count), int(length)) for count, length in windows]  # type: ignore[arg-type]
        if len(runs) < 2 and (not runs or runs[0][0] == 1):
            return self.attention(f"{name}.0", query, key, value, rows=rows, heads=heads, scale=scale)
        if not self.slots:
            self._index(runs)
        keys, values = self._written(key, value, self.count, heads, name)
        seen, start, dim = [], 0, width // heads
        for index, ((count, length), (changed, sources)) in enumerate(zip(runs, self.runs, strict=True)):
            at, given = f"{name}.{index}", list[str]()
            for part, every in (("keys", keys), ("values", values)):
                ends = [self.integers(number) for number in (start, start + count * length, 2)]
                run = self.reshape(
                    f"{at}.{part}.run", self.node("Slice", [every, *ends], f"{at}.{part}"), heads, count, length, dim
                )
                some = self.node("Gather", [run, changed], f"{at}.{part}.changed", axis=1)
                given.append(self.transpose(f"{at}.{part}.windows", some, 1, 0, 2, 3))
            queries = self.node("Gather", [self.reshape(f"{at}.rows", query, -1, width), sources], f"{at}.queries")
            attended = self._attended(at, queries, given[0], given[1], heads, scale)
            seen.append(self.reshape(f"{at}.run", attended, -1, width))
            start += count * length
        joined = seen[0] if len(seen) == 1 else self.node("Concat", seen, f"{name}.seen", axis=0)
        found = self.node("Gather", [joined, self.slots], f"{name}.found")
        return self.node("Unsqueeze", [found, self.integers(0)], f"{name}.windowed")

    def _written(self, key: str, value: str, positions: int, heads: int, name: str) -> list[str]:
        """All keys and values, those of the call put in place: float32 ``[1, heads, positions, head_dim]``."""
        layer, kind = self.layers, tensor_type(DTYPES[self.kv])
        self.layers += 1
        found = []
        for part, rows in (("key", key), ("value", value)):
            past = f"{part}{layer}"
            split = self.reshape(f"{name}.{part}.split", rows, 0, 0, heads, self.head_dim)
            new = self.transpose(f"{name}.{part}.new", split, 0, 2, 1, 3)
            if self.kv != "fp32":
                new = self.graph.cast(new, f"{name}.{part}.stored", DTYPES[self.kv])
            shape = [1, heads, positions, self.head_dim]
            self.graph.input(past, kind, shape)
            self.node("ScatterND", [past, self._write_index(heads), new], f"{past}_out")
            self.graph.output(f"{past}_out", kind, shape)
            full = f"{past}_out"
            found.append(full if self.kv == "fp32" else self.graph.cast(full, f"{name}.{part}.read", np.float32))
        return found

    def _write_index(self, heads: int) -> str:
        """``[1, heads, n, 3]``: the place of each row of each head."""
        if not self.heads:
            self.heads = heads
            by_row = self.reshape("write.rows", "positions", 1, 1, -1, 1)
            sizes = [self.integers(1, heads), self.node("Shape", ["positions"], "write.n"), self.integers(1)]
            shape = self.node("Concat", sizes, "write.shape", axis=0)
            each = self.graph.constant("write.heads", np.arange(heads, dtype=np.int64).reshape(1, -1, 1, 1))
            first = self.graph.constant("write.first", np.zeros((1, 1, 1, 1), np.int64))
            parts = [self.node("Expand", [part, shape], f"{part}.all") for part in (first, each, by_row)]
            self.node("Concat", parts, "write", axis=-1)
        return "write"

    def _attended(self, name: str, query: str, keys: str, values: str, heads: int, scale: float) -> str:
        """Queries ``[B, S, width]`` that attend to keys and values ``[B, heads, N, dim]``."""
        if not self.standard:
            return self.graph.fused("MultiHeadAttention", [query, keys, values], [name], num_heads=heads, scale=scale)
        scaled = self.reshape(f"{name}.heads", self.mul(f"{name}.scaled", query, scale), 0, 0, heads, self.head_dim)
        turned = self.transpose(f"{name}.turned", scaled, 0, 2, 1, 3)
        across = self.transpose(f"{name}.across", keys, 0, 1, 3, 2)
        q, k, v = (self._half(part, part) for part in (turned, across, values))
        weights = self.node("Softmax", [self.node("MatMul", [q, k], f"{name}.scores")], f"{name}.weights")
        rows = self.transpose(f"{name}.seen", self.node("MatMul", [weights, v], f"{name}.attended"), 0, 2, 1, 3)
        joined = self.reshape(f"{name}.joined", rows, 0, 0, heads * self.head_dim)
        return self.graph.cast(joined, f"{name}.float", np.float32) if self.precision == "fp16" else joined

    def _index(self, windows: list[tuple[int, int]]) -> None:
        """Of each run of equal windows those with a changed patch ``[w]`` and which rows their queries are ``[w, length]``."""
        ones = self._expanded("positions.ones", "positions", np.float32(1))
        marks = self._scattered("positions.changed", "positions", np.float32, ones)
        ends = [self.graph.constant("int64.zero", np.array(0, np.int64)), self.node("Size", ["positions"], "n"),
                self.graph.constant("int64.one", np.array(1, np.int64))]  # fmt: skip
        ranks = self._scattered("positions.rank", "positions", np.int64, self.node("Range", ends, "rows"))
        offset, start, slots = self.integers(0), 0, []
        for index, (count, length) in enumerate(windows):
            name = f"windows{index}"
            bounds = [self.integers(number) for number in (start, start + count * length, 0)]
            run = self.reshape(f"{name}.patches", self.node("Slice", [marks, *bounds], f"{name}.marks"), count, length)
            any_of = self.node("ReduceMax", [run, self.integers(1)], f"{name}.any", keepdims=0)
            first = self.graph.constant(f"{name}.first", np.eye(1, count, dtype=np.float32)[0])
            is_changed = self.node("Max", [any_of, first], f"{name}.is_changed")
            changed = self.reshape(name, self.node("NonZero", [is_changed], f"{name}.nonzero"), -1)
            by_window = self.reshape(f"{name}.ranks", self.node("Slice", [ranks, *bounds], f"{name}.rank"), count, length)
            self.runs.append((changed, self.node("Gather", [by_window, changed], f"{name}.sources")))
            counted = self.node("CumSum", [is_changed, self.graph.constant("axis0", np.array(0, np.int64))], f"{name}.counted")
            place = self.node("Sub", [self.graph.cast(counted, f"{name}.order", np.int64), self.integers(1)], f"{name}.place")
            begin = self.reshape(f"{name}.begin", self.node("Mul", [place, self.integers(length)], f"{name}.times"), -1, 1)
            inside = self.graph.constant(f"{name}.inside", np.arange(length, dtype=np.int64)[None])
            here = self.add(f"{name}.slots", self.add(f"{name}.of_run", begin, inside), offset)
            slots.append(self.reshape(f"{name}.flat", here, -1))
            taken = self.node("Mul", [self.node("Shape", [changed], f"{name}.w"), self.integers(length)], f"{name}.taken")
            offset, start = self.add(f"{name}.end", offset, taken), start + count * length
        every = slots[0] if len(slots) == 1 else self.node("Concat", slots, "slots.all", axis=0)
        self.slots = self.node("Gather", [every, "positions"], "slots")

    def _scattered(self, name: str, at: str, dtype: DTypeLike, updates: str) -> str:
        """Zeros ``[patches]`` with ``updates`` at some of them."""
        zeros = self.graph.constant(f"zeros.{np.dtype(dtype).name}", np.zeros(self.count, dtype))
        return self.node("ScatterElements", [zeros, at, updates], name, axis=0)

    def _expanded(self, name: str, like: str, number: Any) -> str:
        """A number as often as ``like`` is long."""
        one = self.graph.constant(f"{name}.one", np.array([number]))
        return self.node("Expand", [one, self.node("Shape", [like], f"{name}.shape")], name)

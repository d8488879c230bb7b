"""The profiles for TensorRT. How a graph uses the cache depends on TensorRT's version; norms and rotary positions do not.

The length of the input ``columns{l}`` is the number of rows to read; the graph computes the mask (docs/internals/engines.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.kv import PARTS, stored_as
from edgevlm.export.profiles import Profile
from edgevlm.runtime.graph_profiles import TENSORRT_10_3, TENSORRT_10_15
from edgevlm.runtime.kv import DTYPES, KVType

UNSEEN = {"fp32": np.float32(-1e30), "fp16": np.float16(-6e4)}  # a masked logit, whose softmax weight is exactly 0
NO_ROW = np.int32(2**31 - 1)


@dataclass(slots=True)
class Primitive:
    """Builds norms and rotary positions like :class:`edgevlm.export.profiles.Fused`, but from standard operators in float32."""

    graph: GraphBuilder
    shape: DecoderShape

    def tables(self) -> None:
        g, half = self.graph, self.shape.head_dim // 2
        for name in ("cos", "sin"):
            g.node("Reshape", [g.input(name, TensorProto.FLOAT, [1, "S", half]), g.integers(1, -1, 1, half)], [f"{name}.table"])

    def norm(self, name: str, gamma: np.ndarray, residual: str, delta: str | None) -> tuple[str, str]:
        """Return ``x / sqrt(mean(x^2) + eps) * gamma`` and ``x``, where ``x = residual + delta``."""
        g = self.graph
        x = residual if delta is None else g.node("Add", [residual, delta], [f"{name}.sum"])
        squares = g.node("Mul", [x, x], [f"{name}.squares"])
        mean = g.node("ReduceMean", [squares, g.integers(-1)], [f"{name}.mean"], keepdims=1)
        raised = g.node("Add", [mean, g.number(self.shape.norm_eps)], [f"{name}.raised"])
        normed = g.node("Div", [x, g.node("Sqrt", [raised], [f"{name}.root"])], [f"{name}.normed"])
        return g.node("Mul", [normed, g.weight(f"{name}.weight", gamma)], [name]), x

    def rotate(self, name: str, rows: str, heads: int, table: str = "") -> str:
        """Rotate each head's halves ``(a, b)`` to ``(a cos - b sin, b cos + a sin)``."""
        g, dim = self.graph, self.shape.head_dim
        first, second = f"{name}.first", f"{name}.second"
        by_head = g.node("Reshape", [rows, g.integers(1, -1, heads, dim)], [f"{name}.split"])
        g.node("Split", [by_head, g.integers(dim // 2, dim // 2)], [first, second], axis=-1)
        parts = []
        for part, kept, other, combine in (("a", first, second, "Sub"), ("b", second, first, "Add")):
            cosine = g.node("Mul", [kept, "cos.table"], [f"{name}.{part}.cos"])
            sine = g.node("Mul", [other, "sin.table"], [f"{name}.{part}.sin"])
            parts.append(g.node(combine, [cosine, sine], [f"{name}.{part}"]))
        turned = g.node("Concat", parts, [f"{name}.turned"], axis=-1)
        return g.node("Reshape", [turned, g.integers(1, 0, -1)], [name])


@dataclass(slots=True)
class Columns:
    """Adds the cache's inputs to a decoder graph. Subclasses implement ``attend``, as in :class:`edgevlm.export.kv.Memory`."""

    graph: GraphBuilder
    shape: DecoderShape
    kv: KVType

    def start(self) -> None:
        g, layers = self.graph, self.shape.layers
        total = g.input("total_len", TensorProto.INT32, [layers])
        rows = g.node("Shape", ["inputs_embeds"], ["S"], start=1, end=2)
        past = g.node("Sub", [total, g.cast(rows, "S.int32", np.int32)], ["past"])
        ones = g.constant("one_per_layer", np.ones(layers, np.int64))
        g.node("Split", [past, ones], [f"past{layer}" for layer in range(layers)], axis=0)
        ends = [g.constant("int64.zero", np.array(0, np.int64)), g.node("Squeeze", [rows], ["S.scalar"])]
        indices = g.node("Range", [*ends, g.constant("int64.one", np.array(1, np.int64))], ["new.int64"])
        g.cast(indices, "new", np.int32)

    def declared(self, layer: int) -> list[str]:
        """Add a layer's inputs ``key{l}``, ``value{l}`` and ``columns{l}``, and return the names of the first two."""
        s, g = self.shape, self.graph
        memory: list[int | str] = [1, s.kv_heads, f"C{layer}", s.head_dim]
        g.input(f"columns{layer}", TensorProto.INT32, [f"n{layer}"])
        return [g.input(f"{part}{layer}", stored_as(self.kv), memory) for part in PARTS]

    def read(self, layer: int, part: str, memory: str) -> str:
        g = self.graph
        if part == "key":
            g.node("Shape", [f"columns{layer}"], [f"layer{layer}.n"])
        bounds = [g.integers(0), f"layer{layer}.n", g.integers(2)]
        return g.node("Slice", [memory, *bounds], [f"layer{layer}.{part}s"])

    def stored(self, rows: str) -> str:
        return rows if self.kv == "fp32" else self.graph.cast(rows, f"{rows}.{self.kv}", DTYPES[self.kv])

    def by_head(self, name: str, rows: str, heads: int) -> str:
        """Split rows into heads, in the cache's type. ``[1, S, heads D]`` becomes ``[1, heads, S, D]``."""
        g = self.graph
        split = g.node("Reshape", [self.stored(rows), g.integers(1, -1, heads, self.shape.head_dim)], [f"{name}.split"])
        return g.node("Transpose", [split], [name], perm=[0, 2, 1, 3])

    def joined(self, layer: int, by_row: str) -> str:
        """Join the heads of the attention's output, in float32. ``[.., S, Hq, D]`` becomes ``[1, S, Hq D]``."""
        g, width = self.graph, self.shape.heads * self.shape.head_dim
        rows = g.node("Reshape", [by_row, g.integers(1, -1, width)], [f"layer{layer}.joined"])
        return rows if self.kv == "fp32" else g.cast(rows, f"{rows}.float", np.float32)


@dataclass(slots=True)
class Beside(Columns):
    """The cache for TensorRT 10.3 to 10.14, with operators of opset 20 and attention built from products and a softmax.

    Before TensorRT 10.15, an engine cannot write into memory that it reads. New keys and values are therefore the separate
    outputs ``new_key{l}`` and ``new_value{l}``, which the caller copies into the cache. Both are ``[1, Hkv, S, D]``. The rows
    of query heads that share a key are stacked, so keys need not be repeated. TensorRT recognises the sequence of product, sum,
    softmax and product as attention.
    """

    def start(self) -> None:
        Columns.start(self)
        g, group = self.graph, self.shape.heads // self.shape.kv_heads
        folded = g.node("Tile", ["new", g.integers(group)], ["new.tiled"])
        g.node("Reshape", [folded, g.integers(1, 1, -1, 1)], ["new.folded"])

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        g, s, name = self.graph, self.shape, f"layer{layer}"
        joined = []
        for part, past, rows in zip(PARTS, self.declared(layer), (key, value), strict=True):
            new = self.by_head(f"new_{part}{layer}", rows, s.kv_heads)
            g.output(new, stored_as(self.kv), [1, s.kv_heads, "S", s.head_dim])
            seen = self.read(layer, part, past)
            joined.append(g.node("Concat", [seen, new], [f"{name}.all_{part}s"], axis=2))  # [1, Hkv, n + S, D]
        across = g.node("Transpose", [joined[0]], [f"{name}.across"], perm=[0, 1, 3, 2])
        scores = g.node("MatMul", [self._folded(layer, query), across], [f"{name}.scores"])  # [1, Hkv, g S, n + S]
        masked = g.node("Add", [scores, self._bias(layer)], [f"{name}.masked"])
        weights = g.node("Softmax", [masked], [f"{name}.weights"], axis=-1)
        attended = g.node("MatMul", [weights, joined[1]], [f"{name}.attended"])  # [1, Hkv, g S, D]
        split = g.node("Reshape", [attended, g.integers(s.heads, -1, s.head_dim)], [f"{name}.by_head"])
        return self.joined(layer, g.node("Transpose", [split], [f"{name}.by_row"], perm=[1, 0, 2]))

    def _folded(self, layer: int, query: str) -> str:
        """Scale the query, and stack the rows of query heads that share a key: ``[1, Hkv, g S, D]``."""
        g, s, name = self.graph, self.shape, f"layer{layer}.queries"
        scale = g.constant("scale", np.float32(1 / np.sqrt(s.head_dim)))
        scaled = self.stored(g.node("Mul", [query, scale], [f"{name}.scaled"]))
        split = g.node("Reshape", [scaled, g.integers(-1, s.kv_heads, s.heads // s.kv_heads, s.head_dim)], [f"{name}.split"])
        by_head = g.node("Transpose", [split], [f"{name}.by_head"], perm=[1, 2, 0, 3])
        return g.node("Reshape", [by_head, g.integers(1, s.kv_heads, -1, s.head_dim)], [name])

    def _bias(self, layer: int) -> str:
        """Return the mask that is added to the attention scores: 0 where a row may attend, and UNSEEN elsewhere.

        A new row attends to all valid rows of the cache, to itself and to the new rows before it.
        """
        g, name = self.graph, f"layer{layer}"
        valid = g.node("Less", [f"columns{layer}", f"past{layer}"], [f"{name}.valid"])
        ends = [g.constant(f"int32.{what}", np.int32(at)) for what, at in (("first", 0), ("no_row", NO_ROW))]
        first = g.node("Concat", [g.node("Where", [valid, *ends], [f"{name}.seen_from"]), "new"], [f"{name}.first"], axis=0)
        seen = g.node("LessOrEqual", [first, "new.folded"], [f"{name}.seen"])
        unseen = UNSEEN[self.kv]
        logits = [g.constant("logit.seen", np.zeros((), unseen.dtype)), g.constant("logit.unseen", unseen)]
        return g.node("Where", [seen, *logits], [f"{name}.bias"])


@dataclass(slots=True)
class InPlace(Columns):
    """The cache for TensorRT 10.15 and newer: TensorScatter appends in place, and Attention reads a slice of the cache.

    The caller must bind ``key{l}_out`` and ``value{l}_out`` to the addresses of ``key{l}`` and ``value{l}``.
    """

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        g, s, name = self.graph, self.shape, f"layer{layer}"
        start = g.cast(f"past{layer}", f"{name}.start", np.int64)
        read = []
        for part, past, rows in zip(PARTS, self.declared(layer), (key, value), strict=True):
            new = self.by_head(f"{name}.new_{part}", rows, s.kv_heads)
            present = g.node("TensorScatter", [past, new, start], [f"{part}{layer}_out"], axis=-2, mode="linear")
            g.output(present, stored_as(self.kv), [1, s.kv_heads, f"C{layer}", s.head_dim])
            read.append(self.read(layer, part, present))
        queries = self.by_head(f"{name}.queries", query, s.heads)
        own = g.node("Add", [f"past{layer}", "new"], [f"{name}.own"])  # a row sees itself and the rows before it
        by_row = g.node("Reshape", [own, g.integers(1, 1, -1, 1)], [f"{name}.own.rows"])
        mask = g.node("LessOrEqual", [f"columns{layer}", by_row], [f"{name}.mask"])  # [1, 1, S, n]
        attended = g.node("Attention", [queries, *read, mask], [f"{name}.attended"])
        return self.joined(layer, g.node("Transpose", [attended], [f"{name}.by_row"], perm=[0, 2, 1, 3]))


PROFILES = {
    TENSORRT_10_3: Profile(TENSORRT_10_3, 20, 10, Primitive, Beside, ("fp32", "fp16"), ("full",)),
    TENSORRT_10_15: Profile(TENSORRT_10_15, 24, 12, Primitive, InPlace, ("fp32", "fp16"), ("full",)),
}

"""TensorRT 10.3 to 10.14: operators of opset 20, attention from products and a softmax, new rows as outputs.

An engine of these versions cannot write into what it reads, so that keys and values of the call are attended to beside those
of the memory, and the caller writes them there. The query heads that share keys are folded into rows, g S of them: then keys
need not be repeated, and product, sum, softmax, product is the chain that TensorRT knows for attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgevlm.export.kv import PARTS, STORED
from edgevlm.export.precisions.dequantised import PRECISIONS
from edgevlm.export.profiles import Profile
from edgevlm.export.profiles.memory import KV_TYPES, Columns
from edgevlm.export.profiles.primitive import Primitive
from edgevlm.runtime.graph_profiles import TENSORRT_10_3

UNSEEN = {"fp32": np.float32(-1e30), "fp16": np.float16(-6e4)}  # a logit whose weight is exactly 0
NO_ROW = np.int32(2**31 - 1)


@dataclass(slots=True)
class Beside(Columns):
    """New rows are the outputs ``new_key{l}``, ``new_value{l}`` ``[1, Hkv, S, D]``."""

    def start(self) -> None:
        """``new.folded`` ``[1, 1, g S, 1]`` besides: the row of the call that a row of the folded scores is."""
        Columns.start(self)
        g, group = self.graph, self.shape.heads // self.shape.kv_heads
        folded = g.node("Tile", ["new", self.numbers(group)], ["new.tiled"])
        g.node("Reshape", [folded, self.numbers(1, 1, -1, 1)], ["new.folded"])

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        g, s, name = self.graph, self.shape, f"layer{layer}"
        joined = []
        for part, past, rows in zip(PARTS, self.declared(layer), (key, value), strict=True):
            new = self.by_head(f"new_{part}{layer}", rows, s.kv_heads)
            g.output(new, STORED[self.kv], [1, s.kv_heads, "S", s.head_dim])
            seen = self.read(layer, part, past)
            joined.append(g.node("Concat", [seen, new], [f"{name}.all_{part}s"], axis=2))  # [1, Hkv, n + S, D]
        across = g.node("Transpose", [joined[0]], [f"{name}.across"], perm=[0, 1, 3, 2])
        scores = g.node("MatMul", [self._folded(layer, query), across], [f"{name}.scores"])  # [1, Hkv, g S, n + S]
        masked = g.node("Add", [scores, self._bias(layer)], [f"{name}.masked"])
        weights = g.node("Softmax", [masked], [f"{name}.weights"], axis=-1)
        attended = g.node("MatMul", [weights, joined[1]], [f"{name}.attended"])
        return self._unfolded(layer, attended)

    def _folded(self, layer: int, query: str) -> str:
        """``[1, S, Hq D]`` to ``[1, Hkv, g S, D]``, scaled."""
        g, s, name = self.graph, self.shape, f"layer{layer}.queries"
        scale = g.constant("scale", np.float32(1 / np.sqrt(s.head_dim)))
        scaled = self.stored(g.node("Mul", [query, scale], [f"{name}.scaled"]))
        split = g.node("Reshape", [scaled, self.numbers(-1, s.kv_heads, s.heads // s.kv_heads, s.head_dim)], [f"{name}.split"])
        by_head = g.node("Transpose", [split], [f"{name}.by_head"], perm=[1, 2, 0, 3])
        return g.node("Reshape", [by_head, self.numbers(1, s.kv_heads, -1, s.head_dim)], [name])

    def _unfolded(self, layer: int, attended: str) -> str:
        """``[1, Hkv, g S, D]`` to ``[1, S, Hq D]`` in float32."""
        g, s, name = self.graph, self.shape, f"layer{layer}"
        split = g.node("Reshape", [attended, self.numbers(s.heads, -1, s.head_dim)], [f"{name}.by_head"])
        by_row = g.node("Transpose", [split], [f"{name}.by_row"], perm=[1, 0, 2])
        joined = g.node("Reshape", [by_row, self.numbers(1, -1, s.heads * s.head_dim)], [f"{name}.joined"])
        return self.float32(joined)

    def _bias(self, layer: int) -> str:
        """``[1, 1, g S, n + S]``: 0 where a row may look, UNSEEN elsewhere.

        A column is seen from one row of the call on: a valid row of the memory from the first, a row of the call from itself.
        """
        g, name = self.graph, f"layer{layer}"
        valid = g.node("Less", [f"columns{layer}", f"past{layer}"], [f"{name}.valid"])
        ends = [g.constant(f"int32.{what}", np.int32(at)) for what, at in (("first", 0), ("no_row", NO_ROW))]
        first = g.node("Concat", [g.node("Where", [valid, *ends], [f"{name}.seen_from"]), "new"], [f"{name}.first"], axis=0)
        seen = g.node("LessOrEqual", [first, "new.folded"], [f"{name}.seen"])
        unseen = UNSEEN[self.kv]
        logits = [g.constant("logit.seen", np.zeros((), unseen.dtype)), g.constant("logit.unseen", unseen)]
        return g.node("Where", [seen, *logits], [f"{name}.bias"])


PROFILE = Profile(
    TENSORRT_10_3, 20, 10, Primitive, Beside, KV_TYPES, PRECISIONS, variants=("whole", "projections"), vision=("fp32", "fp16")
)

"""Build spatial-temporal sparse attention (PureKV, arXiv 2510.25600, sec. 3.2) from nodes of the decoder graph.

A call appends F complete frames of p tokens each, but never frame 0. A token sees the prefix and frame 0, which fill slots
``[0, m)`` of its layer and KV head. It also sees the tokens of its own frame up to and including itself, and the previous
frame's token at the same patch. For the call's first frame, ``previous[l]`` lists the cache slots of the previous frame's
tokens (-1: absent). For all later frames, the previous frame is part of the same call.

Attention is dense over m + p keys and one extra key, whose logit is the logit of the previous frame's token. Queries are
``[logit, q]``, keys are ``[0, k]``, and the extra key is ``[1, 0, ...]``. The extra key's softmax weight then
multiplies the value of the previous frame's token, and the product is added to the output. All operators are standard
operators of opset 18. ScatterND writes new rows without a copy if its output is bound to the address of its input.

H is the number of KV heads, g the number of query heads per KV head, S = F p the number of new rows, and T = 1 + m + p the
number of keys per frame.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.kv import Memory

UNSEEN = np.float32(-1e30)  # a masked logit, whose softmax weight is exactly 0


class SparseAttention:
    """Builds sparse attention. Call ``inputs`` once per graph, then ``attend`` for each sparse layer."""

    def __init__(self, graph: GraphBuilder, shape: DecoderShape, memory: Memory) -> None:
        self.graph, self.shape, self.memory = graph, shape, memory
        self.group = shape.heads // shape.kv_heads

    def inputs(self) -> None:
        """Add the inputs ``shared`` (m), int64 ``[1]``, and ``previous``, int64 ``[L, H, p]``, and nodes for all layers."""
        g, s = self.graph, self.shape
        g.input("shared", TensorProto.INT64, [1])
        previous = g.input("previous", TensorProto.INT64, [s.layers, s.kv_heads, "p"])
        g.node("Shape", [previous], ["p"], start=2, end=3)
        g.node("Shape", ["inputs_embeds"], ["S"], start=1, end=2)
        g.node("Neg", ["p"], ["-p"])
        g.node("Div", ["S", "p"], ["F"])
        g.node("Mul", ["p", self.graph.integers(self.group)], ["gp"])
        g.node("Add", ["shared", self.graph.integers(1)], ["1+m"])
        g.node("Add", ["1+m", "p"], ["T"])
        heads, group, dim = s.kv_heads, self.group, s.head_dim
        self._shape_of("shape.query", -1, "p", heads, group, dim)
        self._shape_of("shape.augmented", heads, -1, "gp", dim + 1)
        self._shape_of("shape.scores", -1, "p", "T")
        self._shape_of("shape.weights", heads, -1, "gp", "T")
        self._shape_of("shape.weight", heads, -1, group, "p", 1)
        self._shape_of("shape.own", heads, -1, "p", dim)
        self._shape_of("shape.previous", heads, -1, 1, "p", dim)
        self._shape_of("shape.absent", heads, -1, 1, "p", 1)
        self._shape_of("shape.out", heads, -1, group, "p", dim)
        self._shape_of("shape.frames", 1, "F", 1, 1)
        self._causal_mask()
        self._previous()
        self._write_index()

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """Append new keys and values in place, and return the sparse attention ``[1, S, Hq D]`` of the new rows."""
        g, s, name = self.graph, self.shape, f"layer{layer}"
        (past_key, past_value), (key_out, value_out) = self.memory.bound(layer)
        new_key = self._written(layer, "key", past_key, key_out, key)
        new_value = self._written(layer, "value", past_value, value_out, value)
        previous_key = self._previous_rows(layer, "key", past_key, new_key)
        previous_value = self._previous_rows(layer, "value", past_value, new_value)

        rows = g.node("Reshape", [query, "shape.query"], [f"{name}.q.rows"])  # [F, p, H, g, D]
        split = g.node("Transpose", [rows], [f"{name}.q.split"], perm=[2, 0, 3, 1, 4])  # [H, F, g, p, D]
        scale = g.constant("scale", np.float32(1 / np.sqrt(s.head_dim)))
        scaled = g.node("Mul", [split, scale], [f"{name}.q"])
        products = g.node("Mul", [scaled, previous_key], [f"{name}.previous.products"])
        dot = g.node("ReduceSum", [products, self.graph.integers(-1)], [f"{name}.previous.dot"], keepdims=1)
        logit = g.node("Add", [dot, self._of_layer(layer, "absent", "shape.absent")], [f"{name}.previous.logit"])
        joined = g.node("Concat", [logit, scaled], [f"{name}.q.joined"], axis=-1)  # [H, F, g, p, 1 + D]
        queries = g.node("Reshape", [joined, "shape.augmented"], [f"{name}.queries"])  # [H, F, g p, 1 + D]

        keys = self._seen(layer, "key", past_key, new_key, augmented=True)  # [H, F, T, 1 + D]
        across = g.node("Transpose", [keys], [f"{name}.key.across"], perm=[0, 1, 3, 2])
        scores = g.node("MatMul", [queries, across], [f"{name}.scores"])  # [H, F, g p, T]
        by_row = g.node("Reshape", [scores, "shape.scores"], [f"{name}.scores.rows"])  # [H F g, p, T]
        masked = g.node("Add", [by_row, "mask"], [f"{name}.scores.masked"])
        soft = g.node("Softmax", [masked], [f"{name}.soft"], axis=-1)
        weights = g.node("Reshape", [soft, "shape.weights"], [f"{name}.weights"])  # [H, F, g p, T]

        values = self._seen(layer, "value", past_value, new_value, augmented=False)  # [H, F, T, D]
        dense = g.node("MatMul", [weights, values], [f"{name}.dense"])
        dense = g.node("Reshape", [dense, "shape.out"], [f"{name}.dense.split"])  # [H, F, g, p, D]
        ends = [self.graph.integers(0), self.graph.integers(1), self.graph.integers(-1)]
        weight = g.node("Slice", [weights, *ends], [f"{name}.previous.weight"])
        weight = g.node("Reshape", [weight, "shape.weight"], [f"{name}.previous.weight.split"])  # [H, F, g, p, 1]
        sparse = g.node("Mul", [weight, previous_value], [f"{name}.sparse"])
        total = g.node("Add", [dense, sparse], [f"{name}.attention.split"])
        by_token = g.node("Transpose", [total], [f"{name}.attention.tokens"], perm=[1, 3, 0, 2, 4])  # [F, p, H, g, D]
        return g.node("Reshape", [by_token, g.integers(1, -1, s.heads * s.head_dim)], [f"{name}.attention"])

    def _shape_of(self, name: str, *sizes: int | str) -> None:
        parts = [size if isinstance(size, str) else self.graph.integers(size) for size in sizes]
        self.graph.node("Concat", parts, [name], axis=0)

    def _count(self, name: str, start: str, end: str) -> str:
        g = self.graph
        scalars = [g.node("Squeeze", [part], [f"{name}.{which}"]) for which, part in (("start", start), ("end", end))]
        one = g.constant("int64.one", np.array(1, np.int64))
        return g.node("Range", [*scalars, one], [name])

    def _causal_mask(self) -> None:
        g = self.graph
        g.node("Neg", ["1+m"], ["-(1+m)"])
        rows = g.node(
            "Unsqueeze", [self._count("mask.row", self.graph.integers(0), "p"), self.graph.integers(1)], ["mask.rows"]
        )
        later = g.node("Greater", [self._count("mask.columns", "-(1+m)", "p"), rows], ["mask.later"])
        g.node("Where", [later, g.constant("unseen", UNSEEN), g.constant("seen", np.float32(0))], ["mask"])

    def _previous(self) -> None:
        """Add nodes that compute the slots of the previous frame's tokens, and the mask that hides absent tokens."""
        g = self.graph
        zero = g.constant("int64.zero", np.array(0, np.int64))
        slots = g.node("Max", ["previous", zero], ["previous.slots"])
        g.node("Unsqueeze", [slots, self.graph.integers(-1)], ["slots"])
        missing = g.node("Less", ["previous", zero], ["previous.missing"])
        first = g.node("Where", [missing, g.constant("unseen", UNSEEN), g.constant("seen", np.float32(0))], ["absent.first"])
        g.node("Sub", ["S", "p"], ["S-p"])
        pads = g.node("Concat", [self.graph.integers(0, 0, 0, 0, 0), "S-p"], ["absent.pads"], axis=0)
        g.node("Pad", [first, pads], ["absent"])

    def _write_index(self) -> None:
        g, s = self.graph, self.shape
        shape = g.node("Concat", [self.graph.integers(1, s.kv_heads), "S", self.graph.integers(1)], ["write.shape"], axis=0)
        heads = g.constant("write.heads", np.arange(s.kv_heads, dtype=np.int64).reshape(1, -1, 1, 1))
        rows = g.node(
            "Reshape", [self._count("write.row", self.graph.integers(0), "S"), self.graph.integers(1, 1, -1, 1)], ["write.rows"]
        )
        batch = g.constant("write.batch", np.zeros((1, 1, 1, 1), np.int64))
        parts = [g.node("Expand", [part, shape], [f"{part}.expanded"]) for part in (batch, heads, rows)]
        g.node("Concat", parts, ["write"], axis=-1)

    def _written(self, layer: int, part: str, past: str, present: str, rows: str) -> str:
        """Write new rows after the cached rows, and return them as float32, after rounding to the cache's type.

        ``present`` must be bound to the address of ``past``. ``[1, S, H D]`` becomes ``[1, H, S, D]``.
        """
        new = self.memory.stored(part, layer, self._by_head(f"layer{layer}.new_{part}", rows))
        self.graph.node("ScatterND", [past, self._slots(layer, part), new], [present])
        return self.memory.dequantize(part, layer, new)

    def _slots(self, layer: int, part: str) -> str:
        """Return the indices at which the cache stores a layer's new rows. The shape is ``[1, H, S, 3]``."""
        g, name = self.graph, f"layer{layer}"
        if part == "key":
            total = g.cast(f"total_len{layer}", f"{name}.total", np.int64)
            past = g.node("Sub", [total, "S"], [f"{name}.past"])
            offset = g.node("Concat", [self.graph.integers(0, 0), past], [f"{name}.offset"], axis=0)
            g.node("Add", ["write", offset], [f"{name}.write"])
        return f"{name}.write"

    def _by_head(self, name: str, rows: str) -> str:
        g, s = self.graph, self.shape
        split = g.node("Reshape", [rows, self.graph.integers(1, -1, s.kv_heads, s.head_dim)], [f"{name}.split"])
        return g.node("Transpose", [split], [f"{name}.heads"], perm=[0, 2, 1, 3])

    def _of_layer(self, layer: int, what: str, shape: str | None = None) -> str:
        g, name = self.graph, f"layer{layer}.{what}"
        part = g.node("Gather", [what, self.graph.integers(layer)], [name], axis=0)
        return part if shape is None else g.node("Reshape", [part, shape], [f"{name}.shaped"])

    def _previous_rows(self, layer: int, part: str, past: str, new: str) -> str:
        """For each new row, return the row of the previous frame at the same patch. The shape is ``[H, F, 1, p, D]``."""
        g, name = self.graph, f"layer{layer}.previous_{part}"
        slots = f"layer{layer}.slots" if part == "value" else self._of_layer(layer, "slots")
        first = g.node("GatherND", [past, slots], [f"{name}.first"], batch_dims=2)  # [1, H, p, D]
        first = self.memory.dequantize(part, layer, first)
        others = g.node("Slice", [new, self.graph.integers(0), "-p", self.graph.integers(2)], [f"{name}.others"])
        rows = g.node("Concat", [first, others], [f"{name}.rows"], axis=2)
        return g.node("Reshape", [rows, "shape.previous"], [name])

    def _seen(self, layer: int, part: str, past: str, new: str, *, augmented: bool) -> str:
        """Return the keys or values that each frame's dense attention reads, with the extra key or value first.

        The result is ``[H, F, T, D]``, or ``[H, F, T, 1 + D]`` for ``augmented`` keys.
        """
        g, s, name = self.graph, self.shape, f"layer{layer}.{part}s"
        shared = g.node("Slice", [past, self.graph.integers(0), "shared", self.graph.integers(2)], [f"{name}.slots"])
        shared = self.memory.dequantize(part, layer, shared)
        shared = g.node("Reshape", [shared, self.graph.integers(s.kv_heads, 1, -1, s.head_dim)], [f"{name}.shared"])
        own = g.node("Reshape", [new, "shape.own"], [f"{name}.own"])  # [H, F, p, D]
        stand_in = np.zeros((s.kv_heads, 1, 1, s.head_dim + augmented), np.float32)
        if augmented:
            stand_in[..., 0] = 1
            pads = self.graph.integers(0, 0, 0, 1, 0, 0, 0, 0)
            shared = g.node("Pad", [shared, pads], [f"{name}.shared.padded"])
            own = g.node("Pad", [own, pads], [f"{name}.own.padded"])
        first = g.constant("stand_in.key" if augmented else "stand_in.value", stand_in)
        common = g.node("Concat", [first, shared], [f"{name}.common"], axis=2)  # [H, 1, 1 + m, ...]
        common = g.node("Expand", [common, "shape.frames"], [f"{name}.frames"])
        return g.node("Concat", [common, own], [name], axis=2)

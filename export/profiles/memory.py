"""The cache in graphs for TensorRT: what both profiles share of inputs, lengths and the forms of rows.

A layer is read as far as the input ``columns{l}`` is long, and the mask is made in the graph (docs/engines.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.kv import PARTS, STORED
from edgevlm.runtime.engine import KVType

KV_TYPES: tuple[KVType, ...] = ("fp32", "fp16")


@dataclass(slots=True)
class Columns:
    """Keys and values of one precision in one graph. Profiles write ``attend``."""

    graph: GraphBuilder
    shape: DecoderShape
    kv: KVType

    def start(self) -> None:
        """``past{l}`` int32 ``[1]``, the rows before the call, and ``new`` int32 ``[S]``: 0, 1, .. of the call's rows."""
        g, layers = self.graph, self.shape.layers
        total = g.input("total_len", TensorProto.INT32, [layers])
        rows = g.node("Shape", ["inputs_embeds"], ["S"], start=1, end=2)
        past = g.node("Sub", [total, g.node("Cast", [rows], ["S.int32"], to=TensorProto.INT32)], ["past"])
        ones = g.constant("one_per_layer", np.ones(layers, np.int64))
        g.node("Split", [past, ones], [f"past{layer}" for layer in range(layers)], axis=0)
        ends = [g.constant("int64.zero", np.array(0, np.int64)), g.node("Squeeze", [rows], ["S.scalar"])]
        indices = g.node("Range", [*ends, g.constant("int64.one", np.array(1, np.int64))], ["new.int64"])
        g.node("Cast", [indices], ["new"], to=TensorProto.INT32)

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """Causal attention over the valid rows and those of the call, ``[1, S, heads D]``: ``[1, S, Hq D]``."""
        raise NotImplementedError

    def declared(self, layer: int) -> list[str]:
        """The inputs ``key{l}``, ``value{l}`` and ``columns{l}``; returns the first two."""
        s, g = self.shape, self.graph
        memory: list[int | str] = [1, s.kv_heads, f"C{layer}", s.head_dim]
        g.input(f"columns{layer}", TensorProto.INT32, [f"n{layer}"])
        return [g.input(f"{part}{layer}", STORED[self.kv], memory) for part in PARTS]

    def read(self, layer: int, part: str, memory: str) -> str:
        """The first ``n{l}`` rows of ``[1, Hkv, C, D]``."""
        g = self.graph
        if part == "key":
            g.node("Shape", [f"columns{layer}"], [f"layer{layer}.n"])
        bounds = [self.numbers(0), f"layer{layer}.n", self.numbers(2)]
        return g.node("Slice", [memory, *bounds], [f"layer{layer}.{part}s"])

    def stored(self, rows: str) -> str:
        """Rows in the memory's type."""
        return rows if self.kv == "fp32" else self.graph.node("Cast", [rows], [f"{rows}.{self.kv}"], to=STORED[self.kv])

    def by_head(self, name: str, rows: str, heads: int) -> str:
        """``[1, S, heads D]`` to ``[1, heads, S, D]`` of the memory's type."""
        g = self.graph
        split = g.node("Reshape", [self.stored(rows), self.numbers(1, -1, heads, self.shape.head_dim)], [f"{name}.split"])
        return g.node("Transpose", [split], [name], perm=[0, 2, 1, 3])

    def float32(self, rows: str) -> str:
        """Rows of the memory's type in float32."""
        return rows if self.kv == "fp32" else self.graph.node("Cast", [rows], [f"{rows}.float"], to=TensorProto.FLOAT)

    def numbers(self, *values: int) -> str:
        return self.graph.constant("int64." + ".".join(map(str, values)), np.array(values, np.int64))

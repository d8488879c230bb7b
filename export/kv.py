"""Build the part of a decoder graph that uses the cache: inputs and outputs, dense attention, and type conversions.

With an ``fp32`` or ``fp16`` cache, attention is computed in the cache's type, because otherwise each call would convert the
whole cache. For an int8 cache, GroupQueryAttention has two more inputs per layer: ``key_scale{l}`` and ``value_scale{l}``, each
``[1, Hkv, 1, D]``. GroupQueryAttention rounds new rows to int8, and attends to the rounded values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder, tensor_type
from edgevlm.runtime.kv import DTYPES, KVType

PARTS = ("key", "value")


def stored_as(kv: KVType) -> int:
    """Return the TensorProto.DataType in which a KV precision is stored."""
    return tensor_type(DTYPES[kv])


@dataclass(slots=True)
class Memory:
    """Adds the cache's inputs, its outputs and attention to a decoder graph."""

    graph: GraphBuilder
    shape: DecoderShape
    kv: KVType

    def start(self) -> None:
        g, layers = self.graph, self.shape.layers
        total = g.input("total_len", TensorProto.INT32, [layers])
        last = g.node("Sub", [total, g.constant("one", np.ones(1, np.int32))], ["last_row"])
        ones = g.constant("one_per_layer", np.ones(layers, np.int64))
        g.node("Split", [total, ones], [f"total_len{layer}" for layer in range(layers)], axis=0)
        g.node("Split", [last, ones], [f"last_row{layer}" for layer in range(layers)], axis=0)

    def bound(self, layer: int) -> tuple[list[str], list[str]]:
        """Add a layer's keys and values as inputs and outputs, and return their names.

        Each output must be bound to its input's address. The shapes are ``[1, Hkv, C, D]``.
        """
        s, g, kind = self.shape, self.graph, stored_as(self.kv)
        memory: list[int | str] = [1, s.kv_heads, f"C{layer}", s.head_dim]
        past = [g.input(f"{part}{layer}", kind, memory) for part in PARTS]
        if self.kv == "int8":
            for part in PARTS:
                g.input(f"{part}_scale{layer}", TensorProto.FLOAT, [1, s.kv_heads, 1, s.head_dim])
        return past, [g.output(f"{part}{layer}_out", kind, memory) for part in PARTS]

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """Append new keys and values in place, and return the causal attention ``[1, S, Hq D]`` of the new rows."""
        g, rows, attended = self.graph, [query, key, value], f"layer{layer}.attention"
        if self.kv != "fp16":
            return self.attention(layer, rows, attended)
        rows = [g.cast(row, f"{row}.fp16", np.float16) for row in rows]
        return g.cast(self.attention(layer, rows, f"{attended}.fp16"), attended, np.float32)

    def attention(self, layer: int, rows: list[str], attended: str) -> str:
        past, present = self.bound(layer)
        attributes: dict[str, Any] = {"num_heads": self.shape.heads, "kv_num_heads": self.shape.kv_heads, "do_rotary": 0}
        scales = []
        if self.kv == "int8":
            scales = [*[""] * 5, *(f"{part}_scale{layer}" for part in PARTS)]
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        inputs = [*rows, *past, f"last_row{layer}", f"total_len{layer}", *scales]
        return self.graph.fused("GroupQueryAttention", inputs, [attended, *present], **attributes)

    def stored(self, part: str, layer: int, rows: str) -> str:
        """Convert float32 rows to the cache's storage type. The shape is ``[1, Hkv, n, D]``."""
        if self.kv == "fp32":
            return rows
        g = self.graph
        if self.kv == "int8":
            counted = g.node("Div", [rows, f"{part}_scale{layer}"], [f"{rows}.counted"])
            rounded = g.node("Round", [counted], [f"{rows}.whole"])
            least, most = (g.constant(f"codes.{name}", np.float32(x)) for name, x in (("least", -128), ("most", 127)))
            rows = g.node("Clip", [rounded, least, most], [f"{rows}.codes"])
        return g.cast(rows, f"{rows}.{self.kv}", DTYPES[self.kv])

    def dequantize(self, part: str, layer: int, rows: str) -> str:
        """Convert stored rows to float32. The shape is ``[1, Hkv, n, D]``."""
        if self.kv == "fp32":
            return rows
        g = self.graph
        plain = g.cast(rows, f"{rows}.float", np.float32)
        return plain if self.kv == "fp16" else g.node("Mul", [plain, f"{part}_scale{layer}"], [f"{rows}.numbers"])

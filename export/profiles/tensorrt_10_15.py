"""TensorRT 10.15 and newer: TensorScatter appends in place, and the standard Attention reads a slice of the memory."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from edgevlm.export.kv import PARTS, STORED
from edgevlm.export.precisions.dequantised import PRECISIONS
from edgevlm.export.profiles import Profile
from edgevlm.export.profiles.memory import KV_TYPES, Columns
from edgevlm.export.profiles.primitive import Primitive
from edgevlm.runtime.graph_profiles import TENSORRT_10_15


@dataclass(slots=True)
class InPlace(Columns):
    """``key{l}_out``, ``value{l}_out`` are to be bound to the addresses of ``key{l}``, ``value{l}``."""

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        g, s, name = self.graph, self.shape, f"layer{layer}"
        start = g.node("Cast", [f"past{layer}"], [f"{name}.start"], to=TensorProto.INT64)
        read = []
        for part, past, rows in zip(PARTS, self.declared(layer), (key, value), strict=True):
            new = self.by_head(f"{name}.new_{part}", rows, s.kv_heads)
            present = g.node("TensorScatter", [past, new, start], [f"{part}{layer}_out"], axis=-2, mode="linear")
            g.output(present, STORED[self.kv], [1, s.kv_heads, f"C{layer}", s.head_dim])
            read.append(self.read(layer, part, present))
        queries = self.by_head(f"{name}.queries", query, s.heads)
        attended = g.node("Attention", [queries, *read, self._mask(layer)], [f"{name}.attended"])
        by_row = g.node("Transpose", [attended], [f"{name}.by_row"], perm=[0, 2, 1, 3])
        joined = g.node("Reshape", [by_row, self.numbers(1, -1, s.heads * s.head_dim)], [f"{name}.joined"])
        return self.float32(joined)

    def _mask(self, layer: int) -> str:
        """``[1, 1, S, n]``: a row sees what is not behind itself."""
        g = self.graph
        own = g.node("Add", [f"past{layer}", "new"], [f"layer{layer}.own"])
        by_row = g.node("Reshape", [own, self.numbers(1, 1, -1, 1)], [f"layer{layer}.own.rows"])
        return g.node("LessOrEqual", [f"columns{layer}", by_row], [f"layer{layer}.mask"])


PROFILE = Profile(
    TENSORRT_10_15, 24, 12, Primitive, InPlace, KV_TYPES, PRECISIONS, variants=("whole", "projections"), vision=("fp32", "fp16")
)

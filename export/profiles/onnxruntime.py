"""ONNX Runtime on CPU and CUDA: fused nodes of ``com.microsoft``, and GroupQueryAttention, which appends in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import IR_VERSION, OPSET, GraphBuilder
from edgevlm.export.kv import Memory
from edgevlm.export.profiles import Profile
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.kv import KV_TYPES


@dataclass(slots=True)
class Fused:
    """See :class:`edgevlm.export.profiles.Operators`."""

    graph: GraphBuilder
    shape: DecoderShape

    def tables(self) -> None:
        """As two-dimensional tables, which RotaryEmbedding reads."""
        g, half = self.graph, self.shape.head_dim // 2
        table = g.constant("table.shape", np.array([-1, half], np.int64))
        for name in ("cos", "sin"):
            g.node("Reshape", [g.input(name, TensorProto.FLOAT, [1, "S", half]), table], [f"{name}.table"])

    def norm(self, name: str, gamma: np.ndarray, residual: str, delta: str | None) -> tuple[str, str]:
        g, weight = self.graph, self.graph.weight(f"{name}.weight", gamma)
        if delta is None:
            attributes: dict[str, Any] = {"axis": -1, "epsilon": self.shape.norm_eps, "stash_type": 1}
            return g.node("SimplifiedLayerNormalization", [residual, weight], [name], **attributes), residual
        outputs = [name, "", "", f"{name}.sum"]
        g.fused("SkipSimplifiedLayerNormalization", [residual, delta, weight], outputs, epsilon=self.shape.norm_eps)
        return name, f"{name}.sum"

    def rotate(self, name: str, rows: str, heads: int) -> str:
        start = self.graph.constant("rotary.start", np.zeros(1, np.int64))
        attributes = {"num_heads": heads, "rotary_embedding_dim": 0, "interleaved": 0}
        return self.graph.fused("RotaryEmbedding", [rows, start, "cos.table", "sin.table"], [name], **attributes)


VARIANTS = ("full", "st-spattn", "fp32-kv", "per-layer")
PROFILE = Profile(ONNXRUNTIME, OPSET, IR_VERSION, Fused, Memory, KV_TYPES, VARIANTS)

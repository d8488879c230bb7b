"""Norms and rotary positions in operators that every TensorRT from 10.3 on has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder


@dataclass(slots=True)
class Primitive:
    """See :class:`edgevlm.export.profiles.Operators`. All in float32, whatever the products are in."""

    graph: GraphBuilder
    shape: DecoderShape

    def tables(self) -> None:
        """With a dimension for the heads: ``[1, S, 1, D/2]``."""
        g, half = self.graph, self.shape.head_dim // 2
        by_head = g.constant("table.shape", np.array([1, -1, 1, half], np.int64))
        for name in ("cos", "sin"):
            g.node("Reshape", [g.input(name, TensorProto.FLOAT, [1, "S", half]), by_head], [f"{name}.table"])

    def norm(self, name: str, gamma: np.ndarray, residual: str, delta: str | None) -> tuple[str, str]:
        """``x / sqrt(mean(x^2) + eps) * gamma``."""
        g = self.graph
        x = residual if delta is None else g.node("Add", [residual, delta], [f"{name}.sum"])
        mean = g.node("ReduceMean", [g.node("Mul", [x, x], [f"{name}.squares"]), self._last()], [f"{name}.mean"], keepdims=1)
        raised = g.node("Add", [mean, g.constant("norm.epsilon", np.float32(self.shape.norm_eps))], [f"{name}.raised"])
        normed = g.node("Div", [x, g.node("Sqrt", [raised], [f"{name}.root"])], [f"{name}.normed"])
        return g.node("Mul", [normed, g.weight(f"{name}.weight", gamma)], [name]), x

    def rotate(self, name: str, rows: str, heads: int) -> str:
        """``(a, b)`` to ``(a cos - b sin, b cos + a sin)``, a and b the halves of a head."""
        g, dim = self.graph, self.shape.head_dim
        by_head = g.constant(f"by_{heads}_heads", np.array([1, -1, heads, dim], np.int64))
        halves = g.constant("halves", np.array([dim // 2, dim // 2], np.int64))
        first, second = f"{name}.first", f"{name}.second"
        g.node("Split", [g.node("Reshape", [rows, by_head], [f"{name}.split"]), halves], [first, second], axis=-1)
        parts = []
        for part, kept, other, combine in (("a", first, second, "Sub"), ("b", second, first, "Add")):
            cosine = g.node("Mul", [kept, "cos.table"], [f"{name}.{part}.cos"])
            sine = g.node("Mul", [other, "sin.table"], [f"{name}.{part}.sin"])
            parts.append(g.node(combine, [cosine, sine], [f"{name}.{part}"]))
        turned = g.node("Concat", parts, [f"{name}.turned"], axis=-1)
        return g.node("Reshape", [turned, g.constant("joined.shape", np.array([1, 0, -1], np.int64))], [name])

    def _last(self) -> str:
        return self.graph.constant("norm.axis", np.array([-1], np.int64))

"""Define graph profiles, which determine how decoder graphs are written for each runtime.

Profiles differ in the operators for norms and rotary positions, in the cache, and in the layout of matrices.
docs/internals/engines.md describes the inputs and outputs. ONNX Runtime's profile, for CPU and CUDA, uses fused operators from
``com.microsoft``. The operator GroupQueryAttention appends to the cache in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import IR_VERSION, OPSET, GraphBuilder
from edgevlm.export.kv import Memory
from edgevlm.export.precisions import Layout, Layouts, load_precision
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, check_profile
from edgevlm.runtime.kv import KV_TYPES, KVType
from edgevlm.runtime.plugins import names


@dataclass(frozen=True, slots=True)
class Profile:
    """How decoder graphs are written for one runtime.

    ``operators``: a class such as :class:`Fused`. ``cache``: a class such as :class:`edgevlm.export.kv.Memory`. ``kv``: the
    supported types of cached keys and values. ``variants``: the names of the decoder graphs to write.
    """

    name: str
    opset: int
    ir_version: int
    operators: Callable[[GraphBuilder, DecoderShape], Any]
    cache: Callable[[GraphBuilder, DecoderShape, KVType], Any]
    kv: tuple[KVType, ...]
    variants: tuple[str, ...]

    @property
    def is_tensorrt(self) -> bool:
        return self.name != ONNXRUNTIME

    def precision(self, name: str) -> Layouts:
        """Return the layouts for a weight precision. Raises UserError for an unknown or unsupported precision."""
        chosen = load_precision(name)
        layouts = chosen.tensorrt if self.is_tensorrt else chosen.onnxruntime
        if layouts is None:
            known = [other for other in names("precisions") if load_precision(other).tensorrt is not None]
            raise UserError(f"--precision {name} is not supported by {self.name}; use {' or '.join(known)}")
        return layouts

    def check_kv(self, kv: KVType) -> None:
        """Raise UserError if the profile's graphs do not support cached keys and values of type ``kv``."""
        if kv not in self.kv:
            raise UserError(f"--kv {kv} is not supported by {self.name}; use {' or '.join(self.kv)}")

    def graph(self, name: str, weights: Any, precision: str) -> GraphBuilder:
        return GraphBuilder(name, weights, max(self.opset, load_precision(precision).least_opset), self.ir_version)


@dataclass(slots=True)
class Fused:
    """Builds a decoder's norms and rotary positions from fused operators. Rows are float32 ``[1, S, n]``."""

    graph: GraphBuilder
    shape: DecoderShape

    def tables(self) -> None:
        """Add the inputs ``cos`` and ``sin``, and convert them to the two-dimensional tables that RotaryEmbedding needs.

        The inputs are ``[1, S, D/2]``. If layers with a window have their own rotary base, the inputs are ``[1, S, D]``, and
        these layers' table is the second half.
        """
        g, half = self.graph, self.shape.head_dim // 2
        for name in ("cos", "sin"):
            tables = [f"{name}.table"] if self.shape.local_theta is None else [f"{name}.table", f"local.{name}.table"]
            rows = g.input(name, TensorProto.FLOAT, [1, "S", half * len(tables)])
            wide = g.node("Reshape", [rows, g.integers(-1, half * len(tables))], [f"{name}.rows" if tables[1:] else tables[0]])
            if tables[1:]:
                g.node("Split", [wide, g.integers(half, half)], tables, axis=-1)

    def norm(self, name: str, gamma: np.ndarray, residual: str, delta: str | None) -> tuple[str, str]:
        """Return ``residual + delta`` RMS-normed over the last axis, and the sum itself."""
        g, weight = self.graph, self.graph.weight(f"{name}.weight", gamma)
        if delta is None:
            attributes: dict[str, Any] = {"axis": -1, "epsilon": self.shape.norm_eps, "stash_type": 1}
            return g.node("SimplifiedLayerNormalization", [residual, weight], [name], **attributes), residual
        outputs = [name, "", "", f"{name}.sum"]
        g.fused("SkipSimplifiedLayerNormalization", [residual, delta, weight], outputs, epsilon=self.shape.norm_eps)
        return name, f"{name}.sum"

    def rotate(self, name: str, rows: str, heads: int, table: str = "") -> str:
        """Rotate the two halves of each head by the inputs ``cos`` and ``sin``. Rows are ``[1, S, heads D]``."""
        start = self.graph.constant("rotary.start", np.zeros(1, np.int64))
        attributes = {"num_heads": heads, "rotary_embedding_dim": 0, "interleaved": 0}
        return self.graph.fused(
            "RotaryEmbedding", [rows, start, f"{table}cos.table", f"{table}sin.table"], [name], **attributes
        )


def load_profile(name: str) -> Profile:
    """Return the profile called ``name``. For an unknown name, raise a UserError that suggests a similar name."""
    check_profile(name)
    if name == ONNXRUNTIME:
        return Profile(name, OPSET, IR_VERSION, Fused, Memory, KV_TYPES, ("full", "st-spattn", "per-layer"))
    from edgevlm.export.profiles import tensorrt

    return tensorrt.PROFILES[name]


def rounded_layout(precision: str, profile: str = ONNXRUNTIME) -> Layout:
    """Return the layout of a precision's matrices. Raises UserError if the precision does not round weights to integers."""
    layout = load_profile(profile).precision(precision).matrices
    if not layout.is_integer:
        raise UserError(
            f"--rounding gptq requires an integer precision, not {precision}; add --precision int4, int4-zp or int8"
        )
    return layout

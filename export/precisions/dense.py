"""Matrices as floating point numbers, computed with in float32 whatever they are stored in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike
from onnx import TensorProto

from edgevlm.errors import UserError
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.precisions import Float32, Parts


@dataclass(frozen=True, slots=True)
class Dense:
    """``weight``: ``[in, out]``, the order that MatMul packs from."""

    dtype: DTypeLike = np.float32

    def parts(self, weight: Float32) -> Parts:
        return {"weight": _as(self.dtype, weight.T)}

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        return graph.node("MatMul", [rows, _in_float32(graph, tensors[0], self.dtype)], [name])


@dataclass(frozen=True, slots=True)
class DenseRows:
    """``weight``: ``[out, in]``; the rows multiplied are ``[n, in]``."""

    dtype: DTypeLike = np.float32

    def parts(self, weight: Float32) -> Parts:
        return {"weight": _as(self.dtype, weight)}

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        return graph.node("Gemm", [rows, _in_float32(graph, tensors[0], self.dtype)], [name], transB=1)


def _in_float32(graph: GraphBuilder, tensor: str, dtype: DTypeLike) -> str:
    if np.dtype(dtype) == np.float32:
        return tensor
    return graph.node("Cast", [tensor], [f"{tensor}.float32"], to=TensorProto.FLOAT)


def _as(dtype: DTypeLike, weight: Float32) -> np.ndarray:
    """Raises UserError for numbers that ``dtype`` cannot hold."""
    if np.dtype(dtype) == np.float32:
        return weight
    with np.errstate(over="ignore"):
        array = weight.astype(dtype)
    if not np.isfinite(array).all():
        raise UserError(f"a weight of {np.abs(weight).max():.0f} does not fit in fp16; export with --precision fp32 or int8")
    return array

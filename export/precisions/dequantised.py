"""Matrices for strongly typed TensorRT networks: products in float16, of weights that are float16 or become it in the graph.

Whole numbers are symmetric, ``code * scale`` with a scale above 0 and no zero point, as TensorRT's parser demands, and go
through DequantizeLinear, which its engines may merge with the product. Rows are converted to float16, products to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto

from edgevlm.errors import UserError
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.precisions import Float32, Parts, Precision
from edgevlm.export.precisions.dense import Dense, DenseRows

LARGEST_BLOCK = 128
LEAST_SCALE = np.float16(2.0**-24)  # the smallest float16 above 0


@dataclass(frozen=True, slots=True)
class Half:
    """``weight``: float16 ``[in, out]``."""

    def parts(self, weight: Float32) -> Parts:
        return Dense(np.float16).parts(weight)

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        return _product(graph, "MatMul", name, rows, tensors[0])


@dataclass(frozen=True, slots=True)
class HalfRows:
    """``weight``: float16 ``[out, in]``; the rows multiplied are ``[n, in]``."""

    def parts(self, weight: Float32) -> Parts:
        return DenseRows(np.float16).parts(weight)

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        return _product(graph, "Gemm", name, rows, tensors[0], transB=1)


@dataclass(frozen=True, slots=True)
class PerChannel:
    """``codes`` int8 ``[in, out]`` from -127 to 127, ``scales`` float16 ``[out]``: max|w| / 127 of each output channel."""

    def parts(self, weight: Float32) -> Parts:
        scales = _scales(np.abs(weight).max(1) / np.float32(127))
        codes = np.clip(np.rint(weight / scales.astype(np.float32)[:, None]), -127, 127)
        return {"codes": codes.T.astype(np.int8), "scales": scales}

    def rounded(self, weight: Float32) -> Float32:
        """The numbers ``[out, in]`` that are stored of a matrix."""
        parts = self.parts(weight)
        numbers: Float32 = (parts["codes"].astype(np.float32) * parts["scales"].astype(np.float32)).T
        return numbers

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        numbers = graph.node("DequantizeLinear", tensors, [f"{name}.numbers"], axis=1)
        return _product(graph, "MatMul", name, rows, numbers)


@dataclass(frozen=True, slots=True)
class PerBlock:
    """``codes`` int4 ``[in, out]`` from -7 to 7, ``scales`` float16 ``[in / block, out]``: max|w| / 7 of a block of a column.

    A block is 128 numbers, or the largest power of two below that divides ``in``. Raises UserError for a matrix of which an odd
    number is made: two codes share a byte.
    """

    def parts(self, weight: Float32) -> Parts:
        out, width = weight.shape
        if out % 2:
            raise UserError(f"a matrix with {out} outputs cannot be stored in 4 bits; give --precision int8 or fp16")
        blocks = weight.reshape(out, -1, block_of(width))
        scales = _scales(np.abs(blocks).max(2) / np.float32(7))
        codes = np.clip(np.rint(blocks / scales.astype(np.float32)[..., None]), -7, 7).reshape(out, width)
        return {"codes": codes.T.astype(np.int8).astype(ml_dtypes.int4), "scales": scales.T}

    def rounded(self, weight: Float32) -> Float32:
        """The numbers ``[out, in]`` that are stored of a matrix."""
        parts = self.parts(weight)
        scales = np.repeat(parts["scales"].astype(np.float32), block_of(weight.shape[1]), 0)
        numbers: Float32 = (parts["codes"].astype(np.int8) * scales).T
        return numbers

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        size = block_of(shape[1])
        numbers = graph.node("DequantizeLinear", tensors, [f"{name}.numbers"], axis=0, block_size=size)
        return _product(graph, "MatMul", name, rows, numbers)


def block_of(width: int) -> int:
    """Numbers that share a scale, of columns of ``width``."""
    return int(np.gcd(width, LARGEST_BLOCK))


def _scales(wanted: Float32) -> np.ndarray:
    """In float16, above 0. Raises UserError for those that it cannot hold."""
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
    if not np.isfinite(scales).all():
        raise UserError(f"a weight's scale of {wanted.max():.0f} does not fit in fp16; give --precision fp32")
    return np.maximum(scales, LEAST_SCALE)


def _product(graph: GraphBuilder, op: str, name: str, rows: str, weight: str, **attributes: int) -> str:
    half = graph.node("Cast", [rows], [f"{name}.rows"], to=TensorProto.FLOAT16)
    product = graph.node(op, [half, weight], [f"{name}.half"], "", **attributes)
    return graph.node("Cast", [product], [name], to=TensorProto.FLOAT)


PRECISIONS = {
    "fp32": Precision(matrices=Dense(), table=DenseRows()),
    "fp16": Precision(matrices=Half(), table=HalfRows()),
    "int8": Precision(matrices=PerChannel(), table=HalfRows()),
    "int4": Precision(matrices=PerBlock(), table=HalfRows()),
}

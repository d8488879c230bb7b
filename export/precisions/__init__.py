"""Weight precisions, which determine how a decoder's matrices are stored and multiplied.

A precision is an entry point in ``edgevlm.precisions``. ``edgevlm plan`` uses this module, which must not import onnx.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgevlm.errors import UserError, nearest
from edgevlm.export.precisions.layouts import Blocks, Dense, Float32, Layout, Parts, RowsByColumns, Symmetric
from edgevlm.runtime.plugins import load_class, names

if TYPE_CHECKING:
    from edgevlm.export.graph import GraphBuilder

__all__ = ["DEFAULT_PRECISION", "Float32", "Layout", "Layouts", "Parts", "Precision", "Stored", "load_precision"]

DEFAULT_PRECISION = "fp32"
HALF_ROWS = Dense(np.float16, by_row=True, half=True)


class Layouts(NamedTuple):
    """The layouts of a precision: ``matrices`` for the layers' matrices, ``table`` for the embedding and the head.

    The engine reads single rows of the embedding, so ``table`` must store rows one after another, as floating-point numbers or
    as 8-bit codes with scales but no zero points. ``rotated``: whether the layers' rows are rotated, as
    :mod:`edgevlm.export.rotation` explains.
    """

    matrices: Layout
    table: Layout
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class Precision:
    """A weight precision, named by an entry point in ``edgevlm.precisions``.

    ``tensorrt``: the layouts for TensorRT, or None if its parser does not support the type. ``least_opset``: the first ONNX
    opset with this type.
    """

    onnxruntime: Layouts
    tensorrt: Layouts | None
    least_opset: int = 0


FP32 = Precision(Layouts(Dense(), Dense(by_row=True)), Layouts(Dense(), Dense(by_row=True)))
# ONNX Runtime's CPU kernels have no float16 product, so FP16 weights are float16 in the file and float32 in memory
FP16 = Precision(Layouts(Dense(np.float16), Dense(np.float16, by_row=True)), Layouts(Dense(np.float16, half=True), HALF_ROWS))
# INT8: matrices have one scale per output; embedding and head, which are not rotated, have a scale per block of 32
INT8 = Precision(Layouts(RowsByColumns(), Blocks(8), rotated=True), Layouts(Symmetric(8), HALF_ROWS))
# INT4 and INT4_ZP: matrices have 4 bits in blocks of 32, without or with zero points; embedding and head have 8 bits
INT4 = Precision(Layouts(Blocks(4), Blocks(8)), Layouts(Symmetric(4), HALF_ROWS), least_opset=21)
INT4_ZP = Precision(Layouts(Blocks(4, with_zeros=True), Blocks(8)), None)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix in its stored form. All graphs that use the matrix share one copy. ``shape``: (out, in)."""

    layout: Layout
    parts: Parts
    shape: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout, weight: Float32, hessian: Float32 | None = None) -> Stored:
        return cls(layout, layout.parts(weight, hessian), (weight.shape[0], weight.shape[1]))

    @classmethod
    def written(cls, layout: Layout, weight: Float32) -> Stored:
        """Return a one-row placeholder for a matrix that has been written to the weights file already."""
        return cls(layout, layout.parts(weight[:1]), (weight.shape[0], weight.shape[1]))

    def multiply(self, graph: GraphBuilder, name: str, rows: str) -> str:
        """Add nodes for ``rows @ weight.T``, and return the product. The matrix is added to the weights file under ``name``."""
        tensors = [graph.weight(f"{name}.{part}", array) for part, array in self.parts.items()]
        return self.layout.multiply(graph, name, rows, tensors, self.shape)


@cache  # ``edgevlm plan`` calls this function hundreds of times; a lookup searches all packages
def load_precision(name: str) -> Precision:
    """Return the precision called ``name``. For an unknown name, raise a UserError that suggests a similar name."""
    if name not in (known := names("precisions")):
        raise UserError(f"unknown --precision {name!r}; {nearest(name, known)}")
    precision: Precision = load_class("precisions", name)
    return precision

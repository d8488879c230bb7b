"""Store matrices ``[out, in]`` in various layouts, and add the graph nodes that multiply by them.

ONNX Runtime uses :class:`Dense`, :class:`Blocks` and :class:`Channels`. TensorRT's networks are strongly typed: they multiply
in float16 if the layout is ``Dense`` with ``half`` or :class:`Symmetric`. TensorRT's parser accepts only integers with a
positive scale and no zero point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgevlm.errors import UserError
from edgevlm.export.precisions.rounding import Float32, best_grid, block_grid, half_grid, rounded

if TYPE_CHECKING:
    from edgevlm.export.graph import GraphBuilder

Parts = Mapping[str, NDArray]
UInt8 = NDArray[np.uint8]

LARGEST_BLOCK = 128
LEAST_STEP = 1e-30  # the step of a row of zeros


class Layout(ABC):
    """A way to store matrices. If ``is_integer``, weights are rounded to integers."""

    is_integer: ClassVar[bool] = False

    @property
    def multiplies_bytes(self) -> bool:
        """Return whether products of many rows run at the speed of the processor's 8-bit arithmetic."""
        return False

    @abstractmethod
    def parts(self, weight: Float32, hessian: Float32 | None = None) -> Parts:
        """Return the arrays to store, keyed by name. Integers are rounded to nearest or, given a Hessian, by GPTQ.

        ``hessian``: ``x.T @ x / n`` for n input rows ``x`` of the matrix, with shape ``[in, in]``. ``hessian`` is None unless
        ``is_integer``.
        """

    @abstractmethod
    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        """Add nodes for ``rows [..., in] @ weight.T`` and return the float32 result. ``tensors``: the stored arrays' names."""

    @abstractmethod
    def bytes_per_weight(self, group: int | None = None) -> float:
        """Return the stored bytes per weight. ``group``: how many weights share a scale, by default the layout's block size."""

    def packed_bytes_per_weight(self, group: int | None = None) -> float:
        """Return the bytes per weight in ONNX Runtime's packed form on x86-64, which is 4 for floating-point numbers."""
        return self.bytes_per_weight(group) if self.is_integer else 4


@dataclass(frozen=True, slots=True)
class Dense(Layout):
    """Stores floating-point numbers in one array, ``weight``.

    The array's shape is ``[in, out]``, as MatMul expects, or ``[out, in]`` if ``by_row``. Products are computed in float32 or,
    with ``half``, in float16.
    """

    dtype: DTypeLike = np.float32
    by_row: bool = False
    half: bool = False

    def parts(self, weight: Float32, hessian: Float32 | None = None) -> Parts:
        return {"weight": _as(self.dtype, weight if self.by_row else weight.T)}

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        op, attributes = ("Gemm", {"transB": 1}) if self.by_row else ("MatMul", {})
        if self.half:
            return _half_product(graph, op, name, rows, tensors[0], **attributes)
        weight = tensors[0]
        if np.dtype(self.dtype) != np.float32:
            weight = graph.cast(weight, f"{weight}.float32", np.float32)
        return graph.node(op, [rows, weight], [name], "", **attributes)

    def bytes_per_weight(self, group: int | None = None) -> float:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Blocks(Layout):
    """Stores 4-bit or 8-bit integers in blocks of ``size`` along a row, and multiplies with ``com.microsoft.MatMulNBits``.

    A weight is ``(code - zero) * scale``; code and zero are unsigned. A row has B = ``ceil(in / size)`` blocks; the last is
    padded with zeros. ``codes`` is uint8 ``[out, B, size * bits / 8]``; two 4-bit codes share a byte, the first in its low
    half. ``scales`` is float32 ``[out, B]``. If ``with_zeros``, there are also ``zeros``, uint8 ``[out, ceil(B * bits / 8)]``.

    ``level`` is ONNX Runtime's ``accuracy_level``. Level 4 rounds activations to 8 bits, block by block, and sums in integers;
    level 0 computes in float32. Without prepacking, a session always computes in float32, which is slow.
    """

    bits: int
    size: int = 32
    with_zeros: bool = False
    level: int = 4

    is_integer: ClassVar[bool] = True

    def parts(self, weight: Float32, hessian: Float32 | None = None) -> Parts:
        """Return the arrays to store. With a Hessian, try several scales for each block and use the best."""
        grid = partial(block_grid if hessian is None else best_grid, bits=self.bits, with_zeros=self.with_zeros)
        codes, scales, zeros = rounded(weight, hessian, self.size, grid, (0, (1 << self.bits) - 1))
        blocks = np.zeros((len(weight), scales.shape[1] * self.size), np.uint8)
        blocks[:, : codes.shape[1]] = codes
        blocks = blocks.reshape(len(weight), -1, self.size)
        return self.packed(blocks, scales, zeros.astype(np.uint8) if self.with_zeros else None)

    def packed(self, codes: UInt8, scales: Float32, zeros: UInt8 | None) -> Parts:
        """Pack rounded weights into the arrays to store. Shapes: ``codes [out, B, size]``, the others ``[out, B]``."""
        parts: dict[str, NDArray] = {"codes": self._bytes(codes), "scales": scales}
        return parts if zeros is None else parts | {"zeros": self._bytes(zeros)}

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        sizes = {"N": shape[0], "K": shape[1], "bits": self.bits, "block_size": self.size}
        return graph.fused("MatMulNBits", [rows, *tensors], [name], **sizes, accuracy_level=self.level)

    def bytes_per_weight(self, group: int | None = None) -> float:
        return self.bits / 8 + (4 + self.with_zeros * self.bits / 8) / (group or self.size)

    @property
    def multiplies_bytes(self) -> bool:
        """Return whether the C++ extension multiplies in 8 bits: only 4-bit codes in blocks of 32, without zero points."""
        return self.bits == 4 and self.size == 32 and not self.with_zeros

    def packed_bytes_per_weight(self, group: int | None = None) -> float:
        """Return the bytes per weight in ONNX Runtime's packed form. Level 4 adds a float32 sum for each block."""
        return self.bytes_per_weight(group) + (4 / (group or self.size) if self.level == 4 else 0)

    def _bytes(self, codes: UInt8) -> UInt8:
        """Pack two 4-bit codes per byte along the last axis. 8-bit codes are returned unchanged."""
        if self.bits == 8:
            return codes
        if codes.shape[-1] % 2:
            codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
        return np.bitwise_or(codes[..., 0::2], np.left_shift(codes[..., 1::2], 4), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Channels(Layout):
    """Stores 8-bit integers with one scale per output channel, and multiplies with ``com.microsoft.MatMulIntegerToFloat``.

    Rows of activations are rounded to bytes. ``codes`` is int8 ``[in, out]``; ``scales`` is float32 ``[out]``, of any sign.
    """

    is_integer: ClassVar[bool] = True
    multiplies_bytes = True

    def parts(self, weight: Float32, hessian: Float32 | None = None) -> Parts:
        grid = partial(block_grid if hessian is None else best_grid, bits=8, with_zeros=False)
        codes, scales, _ = rounded(weight, hessian, weight.shape[1], grid, (0, 255))
        return {"codes": (codes - 128).T.astype(np.int8), "scales": scales[:, 0]}

    def multiply(
        self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int], zero: int = 128
    ) -> str:
        step = self.steps(graph, name, rows, zero)
        scaled = graph.node("Div", [rows, step], [f"{name}.scaled"])
        return graph.node("Mul", [self.product(graph, f"{name}.product", scaled, tensors, 1.0, zero), step], [name])

    def steps(self, graph: GraphBuilder, name: str, rows: str, zero: int) -> str:
        """Return the smallest divisor for each row that makes its numbers fit into bytes. The shape is ``[.., 1]``."""
        ends = []
        for op, codes in (("ReduceMax", 255 - zero), ("ReduceMin", -zero)):
            end = graph.node(op, [rows, graph.integers(-1)], [f"{name}.{op}"])
            ends.append(graph.node("Div", [end, graph.number(codes)], [f"{name}.{op}.step"]))
        return graph.node("Max", [*ends, graph.number(LEAST_STEP)], [f"{name}.step"])

    def product(
        self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], step: float, zero: int = 128, bias: str = ""
    ) -> str:
        """Return ``rows @ weight.T + bias``. Each number x in ``rows`` is rounded to the byte ``zero + x / step``."""
        scale, offset = graph.number(step), graph.constant(f"uint8.{zero}", np.uint8(zero))
        codes = graph.node("QuantizeLinear", [rows, scale, offset], [f"{name}.rows"])
        inputs = [codes, tensors[0], scale, tensors[1], offset, *(["", bias] if bias else [])]
        return graph.fused("MatMulIntegerToFloat", inputs, [name])

    def bytes_per_weight(self, group: int | None = None) -> float:
        return 1


@dataclass(frozen=True, slots=True)
class RowsByColumns(Channels):
    """The layout :class:`Channels` for decoders. The number with a row's largest magnitude is rounded to 127 or -127.

    In a row of zeros, 0 is divided by 0, so the bytes are arbitrary, but the product is still 0. Rows are rounded only if the
    graph is ``for_cpu``.
    """

    def multiply(
        self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int], zero: int = 128
    ) -> str:
        if not graph.for_cpu:
            return graph.node("MatMul", [rows, graph.node("DequantizeLinear", tensors, [f"{name}.numbers"], axis=1)], [name])
        return Channels.multiply(self, graph, name, rows, tensors, shape, zero)

    def steps(self, graph: GraphBuilder, name: str, rows: str, zero: int) -> str:
        sizes = graph.node("Abs", [rows], [f"{name}.sizes"])
        largest = graph.node("ReduceMax", [sizes, graph.integers(-1)], [f"{name}.largest"])
        return graph.node("Div", [largest, graph.number(127)], [f"{name}.step"])


@dataclass(frozen=True, slots=True)
class Symmetric(Layout):
    """Stores integers from -127 to 127 (8 bits) or from -7 to 7 (4 bits) in ``codes [in, out]``, with float16 ``scales``.

    A scale is the largest magnitude of its weights, divided by 127 or 7. With 8 bits, each output channel has one scale:
    ``scales [out]``. With 4 bits, each block of a column has one scale: ``scales [in / block, out]``. A block's size is the
    largest power of two up to 128 that divides ``in``. Two 4-bit codes share a byte, so an odd number of outputs raises
    UserError.
    """

    bits: int

    is_integer: ClassVar[bool] = True

    def parts(self, weight: Float32, hessian: Float32 | None = None) -> Parts:
        from ml_dtypes import int4

        out, width = weight.shape
        if self.bits == 4 and out % 2:
            raise UserError(f"a matrix with {out} outputs cannot be stored in 4 bits; use --precision int8 or fp16")
        top = (1 << (self.bits - 1)) - 1
        codes, scales, _ = rounded(weight, hessian, self._block(width), partial(half_grid, top=top), (-top, top))
        whole, halves = codes.T.astype(np.int8), scales.astype(np.float16).T
        return {"codes": whole, "scales": halves[0]} if self.bits == 8 else {"codes": whole.astype(int4), "scales": halves}

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        layout: dict[str, Any] = {"axis": 1} if self.bits == 8 else {"axis": 0, "block_size": self._block(shape[1])}
        numbers = graph.node("DequantizeLinear", tensors, [f"{name}.numbers"], **layout)
        return _half_product(graph, "MatMul", name, rows, numbers)

    def bytes_per_weight(self, group: int | None = None) -> float:
        return 1 if self.bits == 8 else 0.5 + 2 / LARGEST_BLOCK

    def _block(self, width: int) -> int:
        """Return how many weights of a column share a scale. ``width``: the column's length."""
        return width if self.bits == 8 else int(np.gcd(width, LARGEST_BLOCK))


def _half_product(graph: GraphBuilder, op: str, name: str, rows: str, weight: str, **attributes: int) -> str:
    half = graph.cast(rows, f"{name}.rows", np.float16)
    product = graph.node(op, [half, weight], [f"{name}.half"], "", **attributes)
    return graph.cast(product, name, np.float32)


def _as(dtype: DTypeLike, weight: Float32) -> NDArray:
    """Convert weights to ``dtype``. Raises UserError if a weight is too large for ``dtype``."""
    if np.dtype(dtype) == np.float32:
        return weight
    with np.errstate(over="ignore"):
        array = weight.astype(dtype)
    if not np.isfinite(array).all():
        raise UserError(f"a weight of {np.abs(weight).max():.0f} does not fit in fp16; export with --precision fp32 or int8")
    return array

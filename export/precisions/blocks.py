"""Matrices as whole numbers of 4 or 8 bits in blocks along a row, multiplied by ``com.microsoft.MatMulNBits``.

A weight is ``(code - zero) * scale``; code and zero are unsigned, and each block of a row has a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.export.graph import CONTRIB, GraphBuilder
from edgevlm.export.precisions import Float32, Parts

UInt8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The layout. B is ``ceil(in / size)``, the last block filled up with zeros.

    Parts: ``codes`` uint8 ``[out, B, size * bits / 8]`` (of two 4-bit codes in a byte the first is the low one), ``scales``
    float32 ``[out, B]`` and, unless zero is always half of the range, ``zeros`` uint8 ``[out, ceil(B * bits / 8)]``.
    level: ONNX Runtime's ``accuracy_level``: 4 rounds activations to 8 bits, block by block, and adds up whole numbers; 0
    computes in float32. (Whatever it says, a session that does not prepack computes in float32, and slowly.)
    """

    bits: int
    size: int = 32
    with_zeros: bool = False
    level: int = 4

    def parts(self, weight: Float32) -> Parts:
        codes, scales, zeros = round_to_blocks(weight, self.bits, self.size, self.with_zeros)
        return self.packed(codes, scales, zeros)

    def rounded(self, weight: Float32) -> Float32:
        """The numbers ``[out, in]`` that are stored of a matrix."""
        codes, scales, zeros = round_to_blocks(weight, self.bits, self.size, self.with_zeros)
        zero = np.float32(1 << (self.bits - 1)) if zeros is None else zeros[..., None].astype(np.float32)
        blocks = (codes - zero) * scales[..., None]
        return blocks.reshape(len(weight), -1)[:, : weight.shape[1]]

    def packed(self, codes: UInt8, scales: Float32, zeros: UInt8 | None) -> Parts:
        """The parts of codes ``[out, B, size]``, scales ``[out, B]`` and zeros ``[out, B]`` or None, one number a byte."""
        parts: dict[str, NDArray] = {"codes": self._bytes(codes), "scales": scales}
        return parts if zeros is None else parts | {"zeros": self._bytes(zeros)}

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        sizes = {"N": shape[0], "K": shape[1], "bits": self.bits, "block_size": self.size}
        return graph.node("MatMulNBits", [rows, *tensors], [name], CONTRIB, **sizes, accuracy_level=self.level)

    def _bytes(self, codes: UInt8) -> UInt8:
        """Codes side by side on the last axis, two to a byte when they have 4 bits."""
        if self.bits == 8:
            return codes
        if codes.shape[-1] % 2:
            codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
        return np.bitwise_or(codes[..., 0::2], np.left_shift(codes[..., 1::2], 4), dtype=np.uint8)


def round_to_blocks(weight: Float32, bits: int, size: int, with_zeros: bool) -> tuple[UInt8, Float32, UInt8 | None]:
    """Codes ``[out, B, size]``, scales ``[out, B]`` and zeros ``[out, B]`` of a matrix ``[out, in]``, rounded to nearest.

    Without zeros the number of largest magnitude in a block, whatever its sign, becomes code 0: there is one step more
    on its side. With zeros the codes span a block's numbers and 0.
    """
    out, width = weight.shape
    padded = np.zeros((out, -(-width // size) * size), np.float32)
    padded[:, :width] = weight
    blocks = padded.reshape(out, -1, size)
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    if with_zeros:
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scales = _never_zero((high - low) / np.float32(top))
        zeros = np.rint(-low / scales).astype(np.uint8)
        shift: UInt8 | int = zeros[..., None]
    else:
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
        scales, zeros, shift = _never_zero(largest / np.float32(-half)), None, half
    codes = np.clip(np.rint(blocks / scales[..., None]) + shift, 0, top).astype(np.uint8)
    return codes, scales, zeros


def _never_zero(scales: Float32) -> Float32:
    """A block of zeros has scale 1."""
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)

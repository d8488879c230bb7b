"""Numbers rounded to whole ones in blocks along a row: each to the nearest, or so that products lose least (GPTQ)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]
Grid = Callable[[Float32], tuple[Float32, Float32]]  # a block [out, n] -> its scales and zeros [out]

DAMPING = 0.01  # of the mean of the Hessian's diagonal
LAZY_BATCH = 128  # columns whose errors are passed on at once
CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # of a block's range, that are tried


def round_to_blocks(weight: Float32, bits: int, size: int, with_zeros: bool) -> tuple[UInt8, Float32, UInt8 | None]:
    """Codes ``[out, B, size]``, scales ``[out, B]`` and zeros ``[out, B]`` of a matrix ``[out, in]``, rounded to nearest.

    Without zeros the number of largest magnitude in a block, whatever its sign, becomes code 0: there is one step more
    on its side. With zeros the codes span a block's numbers and 0.
    """
    out, width = weight.shape
    padded = np.zeros((out, -(-width // size) * size), np.float32)
    padded[:, :width] = weight
    blocks = padded.reshape(out, -1, size)
    scales, zeros = _grid(blocks, bits, with_zeros, 1.0)
    return _codes(blocks, bits, scales, zeros), scales, zeros


def best_grid(blocks: Float32, bits: int, with_zeros: bool) -> tuple[Float32, UInt8 | None]:
    """Scales and zeros ``[..]`` of blocks ``[.., size]``: of CLIP_RATIOS the one of least square error."""
    scales, zeros = _grid(blocks, bits, with_zeros, 1.0)
    least = np.full(blocks.shape[:-1], np.inf, np.float32)
    for ratio in CLIP_RATIOS:
        tried, shift = _grid(blocks, bits, with_zeros, ratio)
        zero = np.float32(1 << (bits - 1)) if shift is None else shift[..., None].astype(np.float32)
        found = (_codes(blocks, bits, tried, shift) - zero) * tried[..., None]
        error = np.square(found - blocks).sum(-1)
        better = error < least
        least[better], scales[better] = error[better], tried[better]
        if zeros is not None and shift is not None:
            zeros[better] = shift[better]
    return scales, zeros


def _grid(blocks: Float32, bits: int, with_zeros: bool, ratio: float) -> tuple[Float32, UInt8 | None]:
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    if with_zeros:
        low, high = np.minimum(blocks.min(-1), 0) * np.float32(ratio), np.maximum(blocks.max(-1), 0) * np.float32(ratio)
        scales = _never_zero((high - low) / np.float32(top))
        return scales, np.rint(-low / scales).astype(np.uint8)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    return _never_zero(largest * np.float32(ratio) / np.float32(-half)), None


def _codes(blocks: Float32, bits: int, scales: Float32, zeros: UInt8 | None) -> UInt8:
    shift = 1 << (bits - 1) if zeros is None else zeros[..., None]
    codes: UInt8 = np.clip(np.rint(blocks / scales[..., None]) + shift, 0, (1 << bits) - 1).astype(np.uint8)
    return codes


def _never_zero(scales: Float32) -> Float32:
    """A block of zeros has scale 1."""
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)


def gptq(
    weight: Float32, hessian: Float32, size: int, grid: Grid, code_range: tuple[int, int]
) -> tuple[Float32, Float32, Float32]:
    """Codes ``[out, in]``, integers in ``code_range``, scales and zeros ``[out, B]``: GPTQ (arXiv 2210.17323, Alg. 1).

    Columns are rounded one after the other, and those that follow make up for the error of each: with ``U`` the upper Cholesky
    factor of the inverse of the damped Hessian, column ``q`` passes on ``(w_q - Q(w_q)) / U_qq * U_q,q+1:``. A block's
    scale is found when its first column's turn comes. A weight is ``(code - zero) * scale``.
    """
    remaining, width = weight.astype(np.float32), weight.shape[1]
    upper = _upper_factor(hessian)
    codes = np.empty_like(remaining)
    scales = np.empty((len(remaining), -(-width // size)), np.float32)
    zeros = np.empty_like(scales)
    for start in range(0, width, LAZY_BATCH):
        end = min(start + LAZY_BATCH, width)
        errors = np.empty((len(remaining), end - start), np.float32)
        for column in range(start, end):
            block = column // size
            if column % size == 0:
                scales[:, block], zeros[:, block] = grid(
                    _block_now(remaining, errors, upper, start, column, min(column + size, width))
                )
            scale, zero, wanted = scales[:, block], zeros[:, block], remaining[:, column]
            codes[:, column] = np.clip(np.rint(wanted / scale) + zero, *code_range)
            errors[:, column - start] = (wanted - (codes[:, column] - zero) * scale) / upper[column, column]
            remaining[:, column + 1 : end] -= errors[:, column - start, None] * upper[column, column + 1 : end]
        remaining[:, end:] -= errors @ upper[start:end, end:]
    return codes, scales, zeros


def _block_now(remaining: Float32, errors: Float32, upper: Float32, start: int, column: int, end: int) -> Float32:
    """Columns of a block as they are by now: those past LAZY_BATCH have not been told of this round's errors."""
    behind = max(start + errors.shape[1], column)
    block = remaining[:, column:end].copy()
    if end > behind:
        block[:, behind - column :] -= errors[:, : column - start] @ upper[start:column, behind:end]
    return block


def _upper_factor(hessian: Float32) -> Float32:
    """``U`` with ``U.T @ U`` the inverse of the damped Hessian; columns that met nothing but 0 pass nothing on."""
    damped, diagonal = hessian.astype(np.float64), np.arange(len(hessian))
    mean = float(damped[diagonal, diagonal].mean()) or 1.0
    damped[diagonal, diagonal] += DAMPING * mean
    # the inverse's upper factor is the inverse of the lower factor of the Hessian read from its end
    backwards = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    upper: Float32 = np.linalg.inv(backwards).astype(np.float32)
    return upper

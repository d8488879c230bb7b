"""Round weights to integers in blocks along a row, either to nearest or by GPTQ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import SLICE

Float32 = NDArray[np.float32]
Grid = Callable[[Float32], tuple[Float32, Float32]]
Rounded = tuple[Float32, Float32, Float32]  # codes [out, in], scales and zeros [out, B]: a weight is (code - zero) * scale

DAMPING = 0.01  # this fraction of the Hessian's mean diagonal element is added to the diagonal
LAZY_BATCH = 128
CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
LEAST_SCALE = np.float16(2.0**-24)  # the smallest float16 above 0


def rounded(weight: Float32, hessian: Float32 | None, size: int, grid: Grid, code_range: tuple[int, int]) -> Rounded:
    """Round a matrix ``[out, in]`` in blocks of ``size``, by GPTQ if there is a Hessian, otherwise to nearest."""
    if hessian is not None:
        return gptq(weight, hessian, size, grid, code_range)
    return nearest(weight, size, grid, code_range)


def nearest(weight: Float32, size: int, grid: Grid, code_range: tuple[int, int]) -> Rounded:
    """Round weights to nearest in blocks of ``size``. A row's last block is padded with zeros."""
    step = max(1, SLICE // weight.shape[1])  # a few rows at once: rounding takes several times the memory of the rows
    parts = []
    for row in range(0, len(weight), step):
        rows = weight[row : row + step]
        blocks = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size))).reshape(len(rows), -1, size)
        scales, zeros = grid(blocks)
        codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], *code_range)
        parts.append((codes.reshape(len(rows), -1), scales, zeros))
    codes, scales, zeros = (np.concatenate(part) for part in zip(*parts, strict=True))
    return codes, scales, zeros


def block_grid(blocks: Float32, bits: int, with_zeros: bool, ratio: float = 1.0) -> tuple[Float32, Float32]:
    """Return the scales and zero points of unsigned codes.

    With zero points, the codes cover a range that holds the block's numbers and 0, with both ends multiplied by ``ratio``.
    Without zero points, the middle code stands for 0. Code 0, the farthest from the middle, stands for the number with the
    largest magnitude, so a scale may be negative.
    """
    top, half = (1 << bits) - 1, np.float32(1 << (bits - 1))
    if with_zeros:
        low, high = np.minimum(blocks.min(-1), 0) * np.float32(ratio), np.maximum(blocks.max(-1), 0) * np.float32(ratio)
        scales = (high - low) / np.float32(top)
    else:
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
        scales = largest * np.float32(ratio) / -half
    scales = np.where(scales == 0, np.float32(1), scales).astype(np.float32)
    return scales, np.rint(-low / scales) if with_zeros else np.full_like(scales, half)


def best_grid(blocks: Float32, bits: int, with_zeros: bool) -> tuple[Float32, Float32]:
    """Try all CLIP_RATIOS for each block, and return the scales and zero points with the smallest squared error."""
    scales, zeros = block_grid(blocks, bits, with_zeros)
    least = np.full(blocks.shape[:-1], np.inf, np.float32)
    for ratio in CLIP_RATIOS:
        tried, shift = block_grid(blocks, bits, with_zeros, ratio)
        codes = np.clip(np.rint(blocks / tried[..., None]) + shift[..., None], 0, (1 << bits) - 1)
        error = np.square((codes - shift[..., None]) * tried[..., None] - blocks).sum(-1)
        better = error < least
        least[better], scales[better], zeros[better] = error[better], tried[better], shift[better]
    return scales, zeros


def half_grid(blocks: Float32, top: int) -> tuple[Float32, Float32]:
    """Return positive float16 scales for codes from -top to top. Raises UserError if a scale is too large for float16."""
    wanted = np.abs(blocks).max(-1) / np.float32(top)
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
    if not np.isfinite(scales).all():
        raise UserError(f"a weight scale of {wanted.max():.0f} does not fit in fp16; use --precision fp32")
    found = np.maximum(scales, LEAST_SCALE).astype(np.float32)
    return found, np.zeros_like(found)


def gptq(weight: Float32, hessian: Float32, size: int, grid: Grid, code_range: tuple[int, int]) -> Rounded:
    """Round by GPTQ (arXiv 2210.17323, Alg. 1).

    Columns are rounded one after another, and later columns compensate for the errors of earlier ones. The error that column
    ``q`` passes on is ``(w_q - Q(w_q)) / U_qq * U_q,q+1:``, where ``U`` is the upper Cholesky factor of the damped Hessian's
    inverse. A block's scale is computed just before its first column is rounded.
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
    """Return a block's columns, corrected for the rounding errors of all earlier columns."""
    behind = max(start + errors.shape[1], column)
    block = remaining[:, column:end].copy()
    if end > behind:
        block[:, behind - column :] -= errors[:, : column - start] @ upper[start:column, behind:end]
    return block


def _upper_factor(hessian: Float32) -> Float32:
    """Return the upper triangular matrix ``U`` for which ``U.T @ U`` is the inverse of the damped Hessian."""
    damped, diagonal = hessian.astype(np.float64), np.arange(len(hessian))
    mean = float(damped[diagonal, diagonal].mean()) or 1.0
    damped[diagonal, diagonal] += DAMPING * mean
    # invert a factor of the Hessian, not the Hessian; reversed axes make the factor upper triangular
    backwards = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    upper: Float32 = np.linalg.inv(backwards).astype(np.float32)
    return upper

"""Read checkpoints already rounded by AWQ or GPTQ: repack codes, zero points and scales without further rounding.

In both formats, a weight is ``w[n, k] = (code - zero) * scale`` with a 4-bit code. For each output, a group of consecutive
inputs shares a zero point and a scale. An int32 holds eight codes or zero points, the first in the lowest bits:

- AWQ ("gemm") has ``qweight`` ``[in, out / 8]``, ``qzeros`` ``[in / group, out / 8]``, ``scales`` ``[in / group, out]``. The
  numbers of an int32 belong to eight neighbouring outputs, number i to the one at index ``AWQ_ORDER[i]``.
- GPTQ has ``qweight`` ``[in / 8, out]``, ``qzeros`` ``[in / group, out / 8]``, ``scales`` ``[in / group, out]`` and ``g_idx``
  ``[in]``. An int32 holds its numbers in order. GPTQ's first format stores each zero point minus 1; ``gptq_v2`` stores the
  zero point itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import DEFAULT_PRECISION, Stored
from edgevlm.export.precisions.layouts import Blocks

PREQUANTISED = "int4-zp"  # the precision in which AWQ and GPTQ matrices are stored
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUPS = (16, 32, 64, 128, 256)  # the block sizes that MatMulNBits supports
INTEGERS = ("I32",)
ADVICE = "use the unquantised checkpoint"


@dataclass(frozen=True, slots=True)
class Prequantised:
    """The AWQ or GPTQ format that ``quantization_config`` names. ``version``: the version of GPTQ's format, 1 or 2."""

    method: str
    group: int
    version: int = 1


def prequantised(config: dict[str, Any]) -> Prequantised | None:
    """Return the AWQ or GPTQ format that ``config.json`` names, or None. Raises UserError for an unsupported format."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found or found.get("quant_method") not in ("awq", "gptq"):
        return None
    method, bits, group = found["quant_method"], found.get("bits", found.get("w_bit")), found.get("group_size", 128)
    said = found.get("version", "gemm") if method == "awq" else found.get("checkpoint_format", found.get("format", "gptq"))
    kind = str(said).lower()
    if bits != 4 or group not in GROUPS or kind not in ("gemm", "gptq", "gptq_v2"):
        what = f"{method} with {bits} bits, groups of {group} and format {kind!r} is not supported"
        wanted = f"only 4 bits, groups of {GROUPS} and formats 'gemm' (AWQ), 'gptq' and 'gptq_v2'"
        raise UserError(f"config.json: {what}, {wanted}; {ADVICE}")
    return Prequantised(method, group, 2 if kind == "gptq_v2" else 1)


def stored_in(config: dict[str, Any], wanted: str | None = None) -> str:
    """Return ``wanted``, or else the default precision: PREQUANTISED for AWQ and GPTQ checkpoints, and fp32 for all others."""
    return wanted or (DEFAULT_PRECISION if prequantised(config) is None else PREQUANTISED)


def check_no_zero_points(config: dict[str, Any], folder: Path) -> None:
    """Raise UserError for an AWQ or GPTQ checkpoint, because TensorRT does not support zero points."""
    packing = prequantised(config)
    if packing is not None:
        raise UserError(
            f"{folder / 'config.json'}: {packing.method} weights have zero points, which TensorRT does not support; {ADVICE}"
        )


def is_packed(checkpoint: Checkpoint, place: str) -> bool:
    """Return whether a matrix was rounded by AWQ or GPTQ. ``place``: the matrix's name."""
    return f"{place}.qweight" in checkpoint.tensors


def check_packed(checkpoint: Checkpoint, packing: Prequantised, place: str, size: tuple[int, int]) -> None:
    """Raise UserError if a tensor of a rounded matrix is missing or has the wrong shape. ``size``: (out, in)."""
    (out, width), group = size, packing.group
    if out % 8 or width % 8 or width % group:
        raise UserError(f"config.json: a matrix of {out} x {width} cannot be divided into groups of {group}; {ADVICE}")
    checkpoint.check(f"{place}.qweight", (width, out // 8) if packing.method == "awq" else (width // 8, out), INTEGERS)
    checkpoint.check(f"{place}.qzeros", (width // group, out // 8), INTEGERS)
    checkpoint.check(f"{place}.scales", (width // group, out))


def read_packed(checkpoint: Checkpoint, packing: Prequantised, place: str, size: tuple[int, int]) -> Stored:
    """Return a rounded matrix with its codes, zero points and scales. ``place``: the matrix's name. ``size``: (out, in)."""
    codes, zeros, scales = _codes(checkpoint, packing, place, size)
    layout = Blocks(4, packing.group, with_zeros=True)
    blocks = np.ascontiguousarray(codes.T).reshape(size[0], -1, packing.group)
    parts = layout.packed(blocks, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T))
    return Stored(layout, parts, size)


def dequantised(checkpoint: Checkpoint, packing: Prequantised, place: str, size: tuple[int, int]) -> NDArray[np.float32]:
    """Return a matrix rounded by AWQ or GPTQ, converted to float32 ``[out, in]``."""
    codes, zeros, scales = _codes(checkpoint, packing, place, size)
    shifted = codes.astype(np.float32) - np.repeat(zeros, packing.group, 0)
    return np.ascontiguousarray((shifted * np.repeat(scales, packing.group, 0)).T)


def _codes(
    checkpoint: Checkpoint, packing: Prequantised, place: str, size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Return the codes ``[in, out]`` of a matrix, and its zero points and scales, each ``[in / group, out]``."""
    check_packed(checkpoint, packing, place, size)
    (out, width), group, is_awq = size, packing.group, packing.method == "awq"
    if f"{place}.g_idx" in checkpoint.tensors:
        order = checkpoint.integers(f"{place}.g_idx", (width,))
        if not np.array_equal(order, np.arange(width) // group):  # ``desc_act`` groups inputs by their activations
            raise UserError(f"config.json: GPTQ with desc_act, which reorders inputs, is not supported; {ADVICE}")
    qweight = checkpoint.integers(f"{place}.qweight", (width, out // 8) if is_awq else (width // 8, out))
    qzeros = checkpoint.integers(f"{place}.qzeros", (width // group, out // 8))
    scales = checkpoint.tensor(f"{place}.scales", (width // group, out))
    places = AWQ_ORDER if is_awq else tuple(range(8))
    codes, zeros = unpacked(qweight, int(is_awq), places), unpacked(qzeros, 1, places)
    if not is_awq and packing.version == 1:
        if (zeros == 15).any():
            raise UserError(f"a zero point of 16 in the checkpoint does not fit in 4 bits; {ADVICE}, or save it as gptq_v2")
        zeros = zeros + np.uint8(1)
    return codes, zeros, scales


def unpacked(packed: NDArray[np.int32], axis: int, order: Sequence[int]) -> NDArray[np.uint8]:
    """Unpack each int32 into eight uint8 numbers along ``axis``.

    Bits 4 i to 4 i + 3 become the number at index ``order[i]``.
    """
    nibbles = np.stack([(packed.view(np.uint32) >> np.uint32(4 * i)) & np.uint32(15) for i in np.argsort(order)], axis + 1)
    shape = [size * (8 if at == axis else 1) for at, size in enumerate(packed.shape)]
    return nibbles.astype(np.uint8).reshape(shape)


def joined(matrices: Sequence[Stored]) -> Stored:
    """Stack the rows of matrices that have the same layout and width."""
    parts = {part: np.concatenate([matrix.parts[part] for matrix in matrices]) for part in matrices[0].parts}
    return Stored(matrices[0].layout, parts, (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]))

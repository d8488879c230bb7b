"""Tensors of a safetensors file, mapped: nothing is read before it is asked for, and nothing in the file is believed unchecked.

A file is 8 bytes with the length of a JSON header, the header (name -> dtype, shape, data_offsets), and the numbers of one
tensor after another.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError

AGAIN = "download or save the checkpoint again"
LONGEST_HEADER = 100_000_000  # bytes, as the format's own readers allow
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "BOOL": 8,
    "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
}  # fmt: skip
_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor in a file, as ``dtype`` and ``shape`` of its header say; ``data``: its bytes, mapped."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``[start, stop)`` as float32. Raises UserError for numbers that are no floating point of 16 bits or more."""
        if self.dtype not in _FLOATS:
            raise UserError(
                f"{self.path}: tensor {self.name!r} is {self.dtype}; give the checkpoint before quantisation, in "
                "float32 or 16 bits"
            )
        numbers = self.data.view(_FLOATS[self.dtype]).reshape(self.shape)[start:stop]
        if self.dtype == "BF16":  # the upper half of a float32
            numbers = (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.asarray(numbers, np.float32)

    def integers(self) -> NDArray[np.int32]:
        """The whole tensor. Raises UserError if it is not int32."""
        if self.dtype != "I32":
            raise UserError(f"{self.path}: tensor {self.name!r} is {self.dtype}, not I32; {AGAIN}")
        return self.data.view("<i4").reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Name -> tensor. Raises UserError for a file that is damaged, or whose header does not fit it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LONGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(file.read(length).decode())
        start = 8 + length
        places = _places(header, size - start)
        data = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged or truncated ({error}); {AGAIN}") from None
    return {name: SafeTensor(path, name, dtype, shape, data[begin:end]) for name, dtype, shape, begin, end in places}


def _places(header: Any, size: int) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, begin, end) of the tensors, which fill ``size`` bytes one after another. Raises ValueError."""
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    places = []
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        facts = facts if isinstance(facts, dict) else {}
        said: list[Any] = [facts.get(key) for key in ("dtype", "shape", "data_offsets")]
        dtype, shape, offsets = said
        if not isinstance(dtype, str) or dtype not in _BITS or not _are_sizes(shape) or not _are_sizes(offsets, 2):
            raise ValueError(f"tensor {name[:80]!r} has no usable dtype, shape and data_offsets")
        if math.prod(shape) * _BITS[dtype] != 8 * (offsets[1] - offsets[0]):
            raise ValueError(f"tensor {name[:80]!r}, {dtype} {shape}, is said to take {offsets[1] - offsets[0]:,} bytes")
        places.append((name, dtype, tuple(shape), *offsets))
    places.sort(key=lambda place: place[3:])
    at = 0
    for name, *_, begin, end in places:
        if begin != at:
            raise ValueError(f"tensor {name[:80]!r} begins at byte {begin:,} and the one before ends at {at:,}")
        at = end
    if at != size:
        raise ValueError(f"its tensors take {at:,} bytes and the file has {size:,}")
    return places


def _are_sizes(value: Any, count: int | None = None) -> bool:
    """Whether ``value`` is a list of a few integers that a file's size can be made of."""
    if not isinstance(value, list) or len(value) > 8 or len(value) != (count or len(value)):
        return False
    return all(type(number) is int and 0 <= number < 1 << 48 for number in value)

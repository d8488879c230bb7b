"""The structs that our kernels take, field by field as ``csrc/*.cu`` have them; addresses are of the device."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint64
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

THREADS = 256  # of every block
TILE = 64  # rows of a block that multiplies matrices

LAYER = np.dtype(
    [
        *((name, np.uint64) for name in ("key", "value", "norm")),
        *((name, np.int64) for name in ("capacity", "norm_stride", "first")),
        *((name, np.int32) for name in ("rows", "known")),
    ]
)
_TWO_PI = Fraction(Decimal("6.283185307179586476925286766559005768394338798750211641949889"))


def _struct(name: str, *fields: str | tuple[type, str]) -> type[ctypes.Structure]:
    """A struct of some names each: addresses, or of the type that comes with them."""
    typed = [(c_uint64, field) if isinstance(field, str) else field for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": [(each, kind) for kind, names in typed for each in names.split()]})


Rows = _struct("Rows", "layers", (c_int32, "heads pairs lanes wide"))
Turns = _struct("Turns", "turns axis", (c_int32, "axes on"))
NormsCall = _struct("NormsCall", (Rows, "rows"))
TurnCall = _struct("TurnCall", (Rows, "rows"), (Turns, "how"), "by")
MovesCall = _struct("MovesCall", (Rows, "rows"), "keep kept from_ to count")
TopCall = _struct("TopCall", "score seq candidate out", (c_int32, "rows k"))
PoolCall = _struct("PoolCall", (Rows, "rows"), "frame row col valid window out slots count", (c_int32, "slot_count"))
SimilarityCall = _struct(
    "SimilarityCall",
    *((Rows, "rows"), (Turns, "how"), "position row col recent valid out slots patch count latest patches sum mean"),
    (c_int32, "slot_count most_patches"),
)
ChooseCall = _struct(
    "ChooseCall",
    *((Rows, "rows"), "similarity pooled seq prefix vision recent keep open chosen thresholds window"),
    (c_int32, "distinctive target keep_recent"),
)
NewerCall = _struct("NewerCall", (Rows, "rows"), (Turns, "how"), "position order held news unit out")
AttentionCall = _struct(
    "AttentionCall",
    *((Rows, "rows"), "query query_seq seq scores highest weight mass", (c_int64, "seq_stride columns")),
    (c_int32, "column all first queries"),
)


def named(kernel: str, dtype: np.dtype) -> str:
    """The kernel for rows of a dtype."""
    return f"{kernel}_{'fp16' if dtype == np.float16 else 'fp32'}"


def lanes_of(pairs: int, each: int) -> int:
    """Lanes that read a row of ``pairs`` rotary pairs together, ``each`` numbers a load: a power of two, 32 at most."""
    return min(32, 1 << max(0, -(-pairs // each) - 1).bit_length())


def blocks(rows: int, lanes: int = 1) -> int:
    """Blocks over ``rows`` rows of ``lanes`` lanes each; at least one."""
    return max(1, -(-rows * lanes // THREADS))


def slots_for(rows: int) -> int:
    """Slots of a table that ``rows`` keys can be found in: a power of two, no more than half full."""
    return 1 << max(5, (2 * rows).bit_length())


def turns_of(inv_freq: NDArray[np.float64]) -> NDArray[np.uint64]:
    """How far each rotary pair turns with one step, in 2^-64 of a full turn, uint64 ``[pairs]``: exact, whatever the step.

    A product with the number of steps wraps around just where the circle does.
    """
    return np.array(_turns(tuple(inv_freq.tolist())), np.uint64)


@lru_cache(maxsize=16)
def _turns(inv_freq: tuple[float, ...]) -> tuple[int, ...]:
    full = 1 << 64
    return tuple(round(Fraction(f) / _TWO_PI * full) % full for f in inv_freq)

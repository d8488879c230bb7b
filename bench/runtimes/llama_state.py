"""A llama.cpp memory full of noise, by way of its saved states: computing it would take minutes.

A state of one sequence, as llama-cpp-python 0.3.36 writes it (little-endian): magic u32, sequence i32, streams u32, rows u32;
for each row position i32, sequences u32, sequence i32; transposed u32, layers u32; for each layer, first of keys and then of
values, type i32, bytes of a row u64, and the rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from edgevlm.export.backbones import DecoderShape
from edgevlm.runtime.kv import DTYPES

TYPES = {"fp32": 0, "fp16": 1}  # of keys and values


def fill(context: Any, shape: DecoderShape, rows: int, kv: str) -> bool:
    """Put ``rows`` rows of noise into sequence 0, which is empty; False, and nothing done, for another state format."""
    start = saved(context)[:8]
    built = state(start, shape, rows, kv)
    taken = lib.llama_state_seq_set_data(context, built.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), built.size, 0)
    return bool(taken == built.size)


def saved(context: Any) -> NDArray[np.uint8]:
    """What llama.cpp writes of sequence 0."""
    block = np.empty(lib.llama_state_seq_get_size(context, 0), np.uint8)
    lib.llama_state_seq_get_data(context, block.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), block.size, 0)
    return block


def state(start: NDArray[np.uint8], shape: DecoderShape, rows: int, kv: str) -> NDArray[np.uint8]:
    """The state of ``rows`` rows of noise; ``start``: its first eight bytes, magic and sequence."""
    places = np.zeros((rows, 3), np.int32)
    places[:, 0], places[:, 1] = np.arange(rows), 1
    parts = [start, _bytes(np.array([1, rows], np.uint32)), _bytes(places), _bytes(np.array([0, shape.layers], np.uint32))]
    stored = DTYPES[kv]
    rng = np.random.default_rng(0)
    for _ in range(2 * shape.layers):
        parts += [_bytes(np.array([TYPES[kv]], np.int32)), _bytes(np.array([stored.itemsize * shape.kv_size], np.uint64))]
        parts.append(_bytes(rng.standard_normal((rows, shape.kv_size), np.float32).astype(stored)))
    return np.concatenate(parts)


def _bytes(array: NDArray) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)

"""Weights in huge pages: a decoder reads all of them for each token, and looks up as few pages as there are.

A backend allocates its memory itself, in small pages. Once it is filled, the system is asked to put what is resident of it into
huge pages (Linux 6.1 does so at once, older ones by and by, others not at all), which changes no byte and no amount.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LEAST = 4 << 20  # bytes of a mapping that is worth it
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MAPS = Path("/proc/self/maps")


def use_huge_pages() -> int:
    """Ask for huge pages under the private memory of this process that is resident; returns the bytes that were asked for.

    0 where the system has none. Memory that is not resident is left out, so that none is taken for nothing.
    """
    try:
        size = int(SIZE.read_text())
        madvise, mincore = (getattr(ctypes.CDLL(None), name) for name in ("madvise", "mincore"))
    except (OSError, ValueError, AttributeError):
        return 0
    asked = 0
    for start, end in _mappings(size):
        resident = np.zeros((end - start) // mmap.PAGESIZE, np.uint8)
        if mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_void_p(resident.ctypes.data)):
            continue
        full = np.all(resident.reshape(-1, size // mmap.PAGESIZE) & 1, axis=1)
        for first, count in _runs(full):
            run = ctypes.c_void_p(start + first * size), ctypes.c_size_t(count * size)
            asked += 0 if madvise(*run, MADV_HUGEPAGE) else count * size
            madvise(*run, MADV_COLLAPSE)  # no matter if refused
    return asked


def _mappings(size: int) -> Iterator[tuple[int, int]]:
    """First and last address of writable private memory of no file, cut to whole huge pages, from LEAST bytes on."""
    for line in MAPS.read_text().splitlines():
        place, rights, _, _, inode, *path = line.split(maxsplit=5)
        if rights != "rw-p" or inode != "0" or (path and path[0] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in place.split("-"))
        start, end = -(-start // size) * size, end // size * size
        if end - start >= LEAST:
            yield start, end


def _runs(full: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First index and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], full, [False]]).astype(np.int8)))
    yield from ((int(first), int(end - first)) for first, end in edges.reshape(-1, 2))

"""Weights as they lie in memory once a backend has opened a graph: held once, and in huge pages.

A backend packs matrices into memory of its own. Copies that it made on the way, and pages of the bundle's files that it read,
stay resident unless they are given back; a graph that reads its matrices from the files has their pages again when it does.
The rest was allocated in small pages; a decoder reads all of it for each token, and looks up as few pages as there are: the
system is asked for huge ones (Linux 6.1 gives them at once, older ones by and by, others not at all), which changes neither
results nor resident bytes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LEAST = 4 << 20  # bytes of a mapping that is worth it
MADV_HUGEPAGE, MADV_PAGEOUT, MADV_COLLAPSE = 14, 21, 25
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MAPS = Path("/proc/self/maps")
DETAILED_MAPS = Path("/proc/self/smaps")


def settle_weights(folder: Path) -> None:
    """Give back what opening a graph of the bundle in ``folder`` left behind, and ask for huge pages for the rest."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    with suppress(OSError, AttributeError):  # another system
        madvise = ctypes.CDLL(None).madvise
        for start, end in _unchanged_mappings(folder):
            # loses nothing, whatever another thread has put there meanwhile
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_PAGEOUT)
    use_huge_pages()


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


def _unchanged_mappings(folder: Path) -> Iterator[tuple[int, int]]:
    """First and last address of private mappings of files in ``folder`` of which no page was written: all can be read again."""
    place, inside, parent = "", False, str(folder.resolve())
    with DETAILED_MAPS.open(errors="surrogateescape") as lines:
        for line in lines:
            name, *rest = line.rstrip().split(maxsplit=5)
            if not name.endswith(":"):
                place, inside = name, len(rest) == 5 and rest[0].endswith("p") and str(Path(rest[4]).parent) == parent
            elif inside and name == "Anonymous:" and rest[0] == "0":
                start, end = (int(address, 16) for address in place.split("-"))
                yield start, end


def _mappings(size: int) -> Iterator[tuple[int, int]]:
    """First and last address of writable private memory of no file, cut to whole huge pages, from LEAST bytes on."""
    for line in MAPS.read_text(errors="surrogateescape").splitlines():
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

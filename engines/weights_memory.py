"""Free duplicate weights after a backend has opened a graph, and move the other weights into huge pages.

When a backend opens a graph, it copies the matrices. The file's pages and temporary copies stay resident until they are freed.
A decoder reads all weights for each token; huge pages save address look-ups. Linux 6.1 and newer provide huge pages on request.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

LEAST = 4 << 20  # bytes; smaller mappings are not worth huge pages
MADV_HUGEPAGE, MADV_PAGEOUT, MADV_COLLAPSE = 14, 21, 25
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def trim() -> None:
    """Return freed heap memory to the system if the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def settle_weights(folder: Path, kept: Collection[str] = ()) -> int:
    """Free the memory that a loaded bundle no longer needs, and request huge pages for the rest.

    Returns how many bytes of huge pages were requested. ``kept``: the files that a backend reads in place.
    """
    trim()
    try:
        madvise, mincore = (getattr(ctypes.CDLL(None), name) for name in ("madvise", "mincore"))
        mappings, size = psutil.Process().memory_maps(grouped=False), int(SIZE.read_text()) if SIZE.exists() else 0
    except (OSError, ValueError, AttributeError, psutil.Error):  # not Linux
        return 0
    asked, parent = 0, str(folder.resolve())
    for mapping in mappings:
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        path = Path(mapping.path)
        if str(path.parent) == parent and path.name not in kept and mapping.perms.endswith("p") and not mapping.anonymous:
            # pages that were never written can be read from the file again
            madvise(*_range(start, end), MADV_PAGEOUT)
        elif size and mapping.perms == "rw-p" and mapping.path in ("[anon]", "[heap]"):
            start, end = -(-start // size) * size, end // size * size  # shrink to whole huge pages
            resident = np.zeros(max(0, end - start) // mmap.PAGESIZE, np.uint8)
            if resident.nbytes * mmap.PAGESIZE < LEAST or mincore(*_range(start, end), ctypes.c_void_p(resident.ctypes.data)):
                continue
            full = np.all(resident.reshape(-1, size // mmap.PAGESIZE) & 1, axis=1)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], full, [False]]).astype(np.int8)))
            for first, last in (start + edges.reshape(-1, 2) * size).tolist():  # runs of resident huge pages
                asked += 0 if madvise(*_range(first, last), MADV_HUGEPAGE) else last - first
                madvise(*_range(first, last), MADV_COLLAPSE)  # may fail: the pages then stay small
    return asked


def _range(start: int, end: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start), ctypes.c_size_t(end - start)

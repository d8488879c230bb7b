"""Keep weights in memory only once, and in huge pages, after a backend has opened a graph.

A backend packs matrices into memory of its own. Temporary copies, and the pages of the bundle's files that it read, stay
resident unless they are freed; a graph that reads its matrices from the files loads their pages again. The rest is in small
pages. A decoder reads all weights for each token, and huge pages save address look-ups, so the system is asked for them (Linux
6.1 provides them at once, older versions later or never). This changes neither results nor resident bytes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

LEAST = 4 << 20  # bytes of a mapping that is worth it
MADV_HUGEPAGE, MADV_PAGEOUT, MADV_COLLAPSE = 14, 21, 25
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def trim() -> None:
    """Return freed memory to the system; does nothing if the C library has no such call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def settle_weights(folder: Path, kept: Collection[str] = ()) -> int:
    """Free the leftovers of opening a graph of the bundle in ``folder``, and request huge pages for the rest.

    kept: names of its files that are read in place. Memory that is not resident is skipped. Returns the bytes for which huge
    pages were requested; 0 if the system has none.
    """
    trim()
    try:
        madvise, mincore = (getattr(ctypes.CDLL(None), name) for name in ("madvise", "mincore"))
        mappings, size = psutil.Process().memory_maps(grouped=False), int(SIZE.read_text()) if SIZE.exists() else 0
    except (OSError, ValueError, AttributeError, psutil.Error):  # another system
        return 0
    asked, parent = 0, str(folder.resolve())
    for mapping in mappings:
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        path = Path(mapping.path)
        if str(path.parent) == parent and path.name not in kept and mapping.perms.endswith("p") and not mapping.anonymous:
            # no page was written: all can be read again, so that this loses nothing
            madvise(*_range(start, end), MADV_PAGEOUT)
        elif size and mapping.perms == "rw-p" and mapping.path in ("[anon]", "[heap]"):
            start, end = -(-start // size) * size, end // size * size  # whole huge pages
            resident = np.zeros(max(0, end - start) // mmap.PAGESIZE, np.uint8)
            if resident.nbytes * mmap.PAGESIZE < LEAST or mincore(*_range(start, end), ctypes.c_void_p(resident.ctypes.data)):
                continue
            full = np.all(resident.reshape(-1, size // mmap.PAGESIZE) & 1, axis=1)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], full, [False]]).astype(np.int8)))
            for first, last in (start + edges.reshape(-1, 2) * size).tolist():  # runs of resident huge pages
                asked += 0 if madvise(*_range(first, last), MADV_HUGEPAGE) else last - first
                madvise(*_range(first, last), MADV_COLLAPSE)  # no matter if refused
    return asked


def _range(start: int, end: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start), ctypes.c_size_t(end - start)

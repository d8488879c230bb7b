"""What a store takes to keep clusters and to return them, from host memory and from a disk whose pages are not in memory.

Beside it, in turns: reads that are not begun before they are asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.timing import spread, timed
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.store import Block, Store, StoreSettings, joined

HOST_BYTES = 4_000_000


def store(
    rows: int = 32,
    heads: int = 2,
    head_dim: int = 64,
    clusters: int = 20_000,
    asked: int = 64,
    rounds: int = 15,
    directory: Path | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """One line: medians over rounds of fetching ``asked`` of ``clusters``, each ``rows`` rows of ``heads`` KV heads in fp16.

    ``put_ms``: of one cluster, ``plain_put_ms`` to copy one; ``wait_ms``: of a fetch
    that was expected as long before as a cold one takes, ``unexpected_ms`` without. Ratios are of rounds.
    Raises UserError where more is asked for than there is.
    """
    if asked > clusters:
        raise UserError(f"--asked {asked} of --clusters {clusters}: ask for no more than there are")
    rng = np.random.default_rng(0)
    one = _block(rng, rows, heads, head_dim)
    plain_put_ms = timed(lambda: [joined([one]) for _ in range(asked)]) / asked
    with TemporaryDirectory(dir=directory, prefix="edgevlm-bench-") as place:
        size = 2 * clusters * (one.nbytes + 128) + 1_000_000
        tiers = Store(Path(place) / "store.bin", settings=StoreSettings(size, HOST_BYTES))
        progress(f"putting {clusters:,} clusters")
        put_ms = timed(lambda: [tiers.put(one) for _ in range(clusters)]) / clusters
        tiers.sync()
        progress(f"fetching {asked} clusters in {rounds} rounds")
        turns = [_turn(tiers, rng, clusters, asked) for _ in range(rounds + 1)][1:]
        tiers.close()
    column = {name: [turn[name] for turn in turns] for name in turns[0]}
    medians = {name: round(float(np.median(values)), 4) for name, values in column.items()}
    over = [one / other for one, other in zip(column["wait_ms"], column["unexpected_ms"], strict=True)]
    yield {
        "bench": "store", "bytes": one.nbytes, "clusters": clusters, "asked": asked, "put_ms": round(put_ms, 4),
        "plain_put_ms": round(plain_put_ms, 4), **medians,
        **spread(over, "wait_over_unexpected", "wait_low", "wait_high", digits=4),
    }  # fmt: skip


def _turn(store: Store, rng: np.random.Generator, clusters: int, asked: int) -> dict[str, float]:
    """Milliseconds of fetching other clusters: cold, from host memory, expected, and not expected."""
    file = store._file
    assert file is not None
    chosen = [rng.choice(clusters, asked, replace=False).tolist() for _ in range(3)]
    forget_pages(file._handle)
    disk = timed(lambda: store.get(chosen[0]))
    host = timed(lambda: store.get(chosen[0]))
    forget_pages(file._handle)
    store.prefetch(chosen[1])
    time.sleep(disk / 1e3)
    expected = timed(lambda: store.get(chosen[1]))
    forget_pages(file._handle)
    time.sleep(disk / 1e3)
    unexpected = timed(lambda: store.get(chosen[2]))
    return {"host_ms": host, "disk_ms": disk, "wait_ms": expected, "unexpected_ms": unexpected}


def forget_pages(handle: int) -> None:
    """Drop a file's pages from the kernel's page cache."""
    os.fdatasync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _block(rng: np.random.Generator, rows: int, heads: int, head_dim: int) -> Block:
    def numbers(kind: type[np.generic], *more: int) -> NDArray:
        return rng.integers(0, 100, (heads, rows, *more)).astype(kind)

    key, value = numbers(np.float16, head_dim), numbers(np.float16, head_dim)
    patch = numbers(np.int16), numbers(np.int16)
    return Block(key, value, numbers(np.int64), numbers(np.int32), *patch, numbers(np.int32, 1), numbers(np.int32))

"""Time how long the store takes to save clusters of tokens and to read them back, from host memory and from disk.

Reads are timed with and without ``prefetch``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.timing import spread, timed
from edgevlm.progress import show
from edgevlm.runtime.store import Block, Store, StoreSettings, joined

HOST_BYTES = 4_000_000
CLUSTERS, ASKED = 20_000, 64
ROWS, HEADS, HEAD_DIM = 32, 2, 64  # a cluster's shape


def store(rounds: int = 15, clusters: int = CLUSTERS, asked: int = ASKED) -> Iterator[dict[str, Any]]:
    """Yield one line with medians over rounds, in milliseconds.

    ``clusters``: how many clusters the store holds. ``asked``: how many clusters a fetch reads. ``put_ms``: time to store one
    cluster. ``plain_put_ms``: time to copy a cluster. ``wait_ms``: the wait for a fetch, ``disk_ms`` after ``prefetch`` began
    it. ``unexpected_ms``: the wait for a fetch without ``prefetch``.
    """
    rng = np.random.default_rng(0)
    one = _block(rng)
    plain_put_ms = timed(lambda: [joined([one]) for _ in range(asked)]) / asked
    with TemporaryDirectory(prefix="edgevlm-bench-") as place:
        size = 2 * clusters * (one.nbytes + 128) + 1_000_000
        tiers = Store(Path(place) / "store.bin", settings=StoreSettings(size, HOST_BYTES))
        show(f"putting {clusters:,} clusters")
        put_ms = timed(lambda: [tiers.put(one) for _ in range(clusters)]) / clusters
        tiers.sync()
        show(f"fetching {asked} clusters in {rounds} rounds")
        turns = [_turn(tiers, rng, clusters, asked) for _ in range(rounds + 1)][1:]
        tiers.close()
    over = (turn["wait_ms"] / turn["unexpected_ms"] for turn in turns)
    yield {
        "bench": "store", "bytes": one.nbytes, "clusters": clusters, "asked": asked, "put_ms": round(put_ms, 4),
        "plain_put_ms": round(plain_put_ms, 4),
        **{name: round(float(np.median([turn[name] for turn in turns])), 4) for name in turns[0]},
        **spread(over, "wait_over_unexpected", "wait_low", "wait_high", digits=4),
    }  # fmt: skip


def _turn(store: Store, rng: np.random.Generator, clusters: int, asked: int) -> dict[str, float]:
    """Return the milliseconds that fetches take from disk and from host memory, with and without ``prefetch``."""
    first, second, third = (rng.choice(clusters, asked, replace=False).tolist() for _ in range(3))
    _forget_pages(store)
    disk = timed(partial(store.get, first))
    host = timed(partial(store.get, first))
    _forget_pages(store)
    store.prefetch(second)
    time.sleep(disk / 1e3)
    expected = timed(partial(store.get, second))
    _forget_pages(store)
    time.sleep(disk / 1e3)
    return {"host_ms": host, "disk_ms": disk, "wait_ms": expected, "unexpected_ms": timed(partial(store.get, third))}


def _forget_pages(store: Store) -> None:
    """Drop the store's file from the kernel's page cache."""
    assert store._file is not None
    os.fdatasync(store._file._handle)
    os.posix_fadvise(store._file._handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _block(rng: np.random.Generator) -> Block:
    def numbers(kind: type[np.generic], *more: int) -> NDArray:
        return rng.integers(0, 100, (HEADS, ROWS, *more)).astype(kind)

    key, value = numbers(np.float16, HEAD_DIM), numbers(np.float16, HEAD_DIM)
    patch = numbers(np.int16), numbers(np.int16)
    return Block(key, value, numbers(np.int64), numbers(np.int32), *patch, numbers(np.int32, 1), numbers(np.int32))

"""What a store takes to keep clusters and to give them back: from host memory, and from a disk whose pages are not in memory.

Beside it, in turns: the same rows read one by one from where they would lie in the order in which they came, and reads that are
not begun before they are asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.rounds import quartiles
from edgevlm.bench.timing import timed
from edgevlm.runtime.store import Block, Store, StoreSettings, joined

HOST_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class Tiers:
    """Medians over rounds of one get of ``asked`` blocks, in milliseconds; ratios are of the rounds' ratios, with quartiles.

    put_ms: of one block, and plain_put_ms to copy one. rows_ms: a read a row. wait_ms: of a get after as long as
    a cold one takes, with ``prefetch`` before that; unexpected_ms: without.
    """

    bytes: int
    asked: int
    put_ms: float
    plain_put_ms: float
    host_ms: float
    disk_ms: float
    rows_ms: float
    rows_over_disk: float
    rows_low: float
    rows_high: float
    wait_ms: float
    unexpected_ms: float
    wait_over_unexpected: float
    wait_low: float
    wait_high: float

    def line(self) -> dict[str, Any]:
        return {"bench": "store", **{name: round(getattr(self, name), 4) for name in self.__slots__}}


def measure(rows: int, heads: int, head_dim: int, blocks: int, asked: int, rounds: int, folder: Path | None) -> Tiers:
    """fp16 blocks of ``rows`` rows; ``folder``: on the disk that is measured."""
    rng = np.random.default_rng(0)
    one = block_of(rng, rows, heads, head_dim)
    plain_put_ms = timed(lambda: [joined([one]) for _ in range(asked)]) / asked
    with TemporaryDirectory(dir=folder, prefix="edgevlm-bench-") as place:
        size = 2 * blocks * (one.nbytes + 128) + 1_000_000
        store = Store(Path(place) / "store.bin", settings=StoreSettings(size, HOST_BYTES))
        put_ms = timed(lambda: [store.put(one) for _ in range(blocks)]) / blocks
        store.sync()
        with scattered(Path(place) / "rows.bin", blocks * rows, one.nbytes // rows) as rows_file:
            turns = [turn(store, rows_file, rng, rows, one.nbytes // rows, blocks, asked) for _ in range(rounds + 1)][1:]
        store.close()
    host, disk, by_row, expected, unexpected = (list(column) for column in zip(*turns, strict=True))
    rows_low, rows_over_disk, rows_high = ratio(by_row, disk)
    wait_low, wait_over_unexpected, wait_high = ratio(expected, unexpected)
    return Tiers(
        one.nbytes, asked, put_ms, plain_put_ms, median(host), median(disk),
        median(by_row), rows_over_disk, rows_low, rows_high,
        median(expected), median(unexpected), wait_over_unexpected, wait_low, wait_high,
    )  # fmt: skip


def turn(
    store: Store, rows_file: int, rng: np.random.Generator, rows: int, row_bytes: int, blocks: int, asked: int
) -> tuple[float, float, float, float, float]:
    """Cold, from host memory, row by row, after they were expected, and without that; each of other blocks."""
    file = store._file
    assert file is not None
    chosen = [rng.choice(blocks, asked, replace=False).tolist() for _ in range(3)]
    cold(file._handle)
    disk = timed(lambda: store.get(chosen[0]))
    host = timed(lambda: store.get(chosen[0]))
    places = rng.choice(blocks * rows, asked * rows, replace=False).tolist()
    cold(rows_file)
    by_row = timed(lambda: [os.pread(rows_file, row_bytes, place * row_bytes) for place in places])
    cold(file._handle)
    store.prefetch(chosen[1])
    time.sleep(disk / 1e3)
    expected = timed(lambda: store.get(chosen[1]))
    cold(file._handle)
    time.sleep(disk / 1e3)
    return host, disk, by_row, expected, timed(lambda: store.get(chosen[2]))


def cold(handle: int) -> None:
    """Let the kernel forget what it has of a file."""
    os.fdatasync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def scattered(path: Path, rows: int, row_bytes: int) -> Iterator[int]:
    """A file of as many rows, each by itself."""
    path.write_bytes(np.random.default_rng(1).bytes(rows * row_bytes))
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        yield handle
    finally:
        os.close(handle)


def block_of(rng: np.random.Generator, rows: int, heads: int, head_dim: int) -> Block:
    def numbers(kind: type[np.generic], *more: int) -> NDArray:
        return rng.integers(0, 100, (heads, rows, *more)).astype(kind)

    key, value = numbers(np.float16, head_dim), numbers(np.float16, head_dim)
    return Block(key, value, numbers(np.int64), numbers(np.int32), numbers(np.int16), numbers(np.int16), numbers(np.int32, 1))


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    return quartiles([a / b for a, b in zip(one, other, strict=True)])

"""Where rows go when they leave the device: blocks by number, over host memory and one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from numpy.typing import NDArray

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.host import HostStore
from edgevlm.runtime.store.settings import StoreSettings
from edgevlm.runtime.store.tiered import TieredStore

__all__ = ["Block", "HostStore", "Store", "StoreSettings", "StoreStats", "StoreUse", "TieredStore", "joined"]


@dataclass(slots=True)
class StoreStats:
    """Counted since the store was opened.

    hits, bytes_host: of what ``get`` found in host memory. wait_ms: that it waited for what it did not find there.
    """

    hits: int = 0
    bytes_host: int = 0
    bytes_disk: int = 0  # read from the file
    reads: int = 0  # of the file
    wait_ms: float = 0.0
    bytes_written: int = 0  # to the file
    lost: int = 0  # blocks that are gone, for whatever reason, damaged ones included
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Bytes in use now, and what was counted until now."""

    host_bytes: int
    file_bytes: int
    index_bytes: int
    stats: StoreStats


@runtime_checkable
class Store(Protocol):
    """Blocks by number. Used by one thread; what it does in the background is its own business.

    ``host_bytes``, ``file_bytes``: what is in use of each now. ``host_limit``: bytes of blocks that it keeps in host memory at
    most; 0: it keeps all.
    """

    @property
    def stats(self) -> StoreStats: ...

    @property
    def host_limit(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    @property
    def file_bytes(self) -> int: ...

    @property
    def index_bytes(self) -> int:
        """Of what says where blocks lie; it grows with the blocks that there are."""
        ...

    def put(self, block: Block) -> int:
        """Keep a block; returns its number: from 0 up, one after another. Never raises for a disk that fails."""
        ...

    def append(self, number: int, block: Block) -> bool:
        """Add rows behind those of a block already there; False when that is lost, and nothing is kept."""
        ...

    def renumber(self, numbers: Sequence[int]) -> range:
        """Give these blocks new numbers, one after another and in this order, without touching their rows; returns those.

        What is lost gets none. The next block put has the number after them.
        """
        ...

    def resident(self, number: int) -> bool:
        """Whether all of a block is in host memory: :meth:`get` of it, now, reads no file. False for one that is lost."""
        ...

    def expect(self, numbers: Sequence[int]) -> None:
        """These will be asked for soon: begin to read what lies in the file."""
        ...

    def get(self, numbers: Sequence[int]) -> list[Block | None]:
        """The blocks, each as it was put, appended rows last; None for one that is lost."""
        ...

    def drop(self, numbers: Sequence[int]) -> None:
        """These will not be asked for again."""
        ...

    def lost(self) -> list[int]:
        """Numbers of blocks found lost since the last call, dropped ones not among them."""
        ...

    def state(self) -> Mapping[str, NDArray]:
        """What a snapshot needs to find the blocks again; everything put until now is in the file then, if there is one."""
        ...

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Go on from :meth:`state`: numbers mean what they meant then; what the store no longer has is lost."""
        ...

    def sync(self) -> None:
        """See everything put until now onto the disk, if there is one: a state outlives a power cut then. From any thread."""
        ...

    def close(self) -> None: ...

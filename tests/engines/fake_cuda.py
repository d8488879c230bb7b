"""A device whose memory is the host's: the driver that the adapter talks to, without a GPU.

Streams are late, as a driver's are: their work is done when they are synchronised and not before, so that an array that was
changed or dropped too early shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cuda.driver import CudaDevice, DeviceMemory

ORIN = CudaDevice("Orin", (8, 7), True, 8 << 30, "12.6")
CARD = CudaDevice("NVIDIA T4", (7, 5), False, 16 << 30, "12.6")
ALIGNMENT = 256


class FakeStream:
    """Work in order, done when it is synchronised."""

    streams: dict[int, FakeStream] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.handle = 0x1000 + 16 * len(self.streams)
        self.streams[self.handle] = self
        self.waiting: list[Callable[[], None]] = []

    def ask(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class FakeDriver:
    """See :class:`edgevlm.runtime.cuda.driver.Driver`."""

    def __init__(self, device: CudaDevice = ORIN, free: int = 4 << 30) -> None:
        self.device, self.free_now = device, free
        self.main = self.stream()
        self.held: dict[int, NDArray[np.uint8]] = {}

    def free_bytes(self) -> int:
        return self.free_now

    def allocate(self, nbytes: int, mapped: bool | None = None) -> DeviceMemory:
        block = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)  # NaN, and lengths that nobody has
        address = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.held[address] = block
        return DeviceMemory(address, nbytes, None)

    def free(self, memory: DeviceMemory) -> None:
        self.held.pop(memory.address)[:] = 0xFF

    def copy_in(self, address: int, array: NDArray, stream: Any = None) -> None:
        self._of(stream).ask(lambda: ctypes.memmove(address, _dense(array), array.nbytes))

    def copy_out(self, array: NDArray, address: int, stream: Any = None) -> None:
        self._of(stream).ask(lambda: ctypes.memmove(_dense(array), address, array.nbytes))

    def copy_rows(self, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: Any = None) -> None:
        def work() -> None:
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, from_ + row * from_pitch, width)

        self._of(stream).ask(work)

    def stream(self) -> FakeStream:
        return FakeStream()

    def _of(self, stream: Any) -> FakeStream:
        return stream or self.main


def _dense(array: NDArray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """Device memory as an array, not copied."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype).reshape(shape)

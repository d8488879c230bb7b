"""The working memory of a cache's kernels, and what one call puts into it.

A call's inputs lie side by side, so that one copy takes them to the device; what must be zero lies behind them, so that one
call clears it. The memory grows to the largest call there was and stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.cuda.driver import Driver, Memory

ALIGNMENT = 256  # bytes


def aligned(nbytes: int) -> int:
    """``nbytes`` up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Workspace:
    """Device memory for one call at a time, and the page-locked host memory that its inputs and results go through."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._held: dict[str, Memory] = {}
        weakref.finalize(self, _free_all, driver, self._held)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._held.values())

    def device(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes; what was in them is lost."""
        return self._at_least("device", nbytes, mapped=None).address

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """uint8 ``[nbytes]`` that the device copies from and to at full speed."""
        host = self._at_least("host", nbytes, mapped=True).host
        assert host is not None
        return host[:nbytes]

    def _at_least(self, name: str, nbytes: int, mapped: bool | None) -> Memory:
        held = self._held.get(name)
        if held is not None and held.nbytes >= nbytes:
            return held
        if held is not None:
            self.driver.main.synchronize()  # what was asked of it may not be done
            self.driver.free(self._held.pop(name))
        self._held[name] = self.driver.allocate(aligned(max(nbytes, ALIGNMENT)), mapped)
        return self._held[name]


def _free_all(driver: Driver, held: dict[str, Memory]) -> None:
    for memory in held.values():
        driver.free(memory)
    held.clear()


class Call:
    """The arrays of one call by name. Name all of them, then :meth:`lay_out` gives each its address, ``call[name]``."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._inputs: dict[str, Sequence[NDArray]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # of what is made on the device
        self._zeroed: set[str] = set()
        self._address: dict[str, int] = {}
        self._base = self._sent = self._cleared = 0  # where it lies, bytes of its inputs, bytes of what is zero

    def put(self, name: str, *arrays: NDArray) -> None:
        """Inputs of one dtype, one behind the other."""
        self._inputs[name] = arrays

    def room(self, name: str, shape: int | tuple[int, ...], dtype: type[np.generic], *, zero: bool = False) -> None:
        """An array to be written on the device, zero at the start if asked for."""
        self._shapes[name] = ((shape,) if isinstance(shape, int) else shape), np.dtype(dtype)
        if zero:
            self._zeroed.add(name)

    def lay_out(self) -> None:
        """Give every array its address; inputs may still change, in place."""
        sizes = {name: sum(array.nbytes for array in arrays) for name, arrays in self._inputs.items()}
        made = sorted(self._shapes, key=lambda name: name not in self._zeroed)
        sizes |= {name: int(np.prod(self._shapes[name][0], dtype=np.int64)) * self._shapes[name][1].itemsize for name in made}
        ends = np.cumsum([aligned(size) for size in sizes.values()], dtype=np.int64)
        base = self._space.device(int(ends[-1]) if len(ends) else 0)
        self._address = {name: base + int(end) - aligned(sizes[name]) for name, end in zip(sizes, ends, strict=True)}
        self._base, self._sent = base, int(ends[len(self._inputs) - 1]) if self._inputs else 0
        self._cleared = sum(aligned(sizes[name]) for name in self._zeroed)

    def send(self) -> None:
        """Take the inputs to the device and clear what is to be zero."""
        if not self._address:
            self.lay_out()
        driver = self._space.driver
        if self._sent:
            driver.copy_in(self._base, self._staged(self._sent))
        driver.clear(self._base + self._sent, self._cleared, self._cleared, 1)

    def __getitem__(self, name: str) -> int:
        return self._address[name]

    def fetch(self, name: str) -> NDArray:
        """What the device has made of an array, once all that was launched before is done; a copy."""
        shape, dtype = self._shapes[name]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        staged = self._space.host(size)
        self._space.driver.copy_out(staged, self[name])
        self._space.driver.main.synchronize()
        return staged.view(dtype).reshape(shape).copy()

    def _staged(self, nbytes: int) -> NDArray[np.uint8]:
        host = self._space.host(nbytes)
        for name, arrays in self._inputs.items():
            start = self[name] - self._base
            for array in arrays:
                into = host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(into, array)
                start += array.nbytes
        return host

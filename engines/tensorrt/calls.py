"""Calls of an engine: arrays in, arrays out, through device memory whose addresses are set when they change."""

from __future__ import annotations

import threading
from math import prod

import numpy as np
from numpy.typing import NDArray

from edgevlm.engines.tensorrt.api import Loaded
from edgevlm.engines.tensorrt.memory import Blocks
from edgevlm.engines.tensorrt.shapes import Dims
from edgevlm.runtime.cuda.driver import Driver

SCRATCH = "scratch"


class Bench:
    """What all engines of a backend share: a stream, a block of memory to work in, and memory for what enters and leaves.

    ``lock`` is held for a call: another one would work in the same memory.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.stream, self.lock = driver, driver.stream(), threading.RLock()
        self.blocks, self._scratch, self._most = Blocks(driver), Blocks(driver), 1
        self.short = False

    def scratch(self, nbytes: int) -> tuple[int, int]:
        """Address and size of the memory to work in, with ``nbytes`` bytes at least."""
        self._most = max(self._most, nbytes)
        return self._scratch.at(SCRATCH, self._most), self._most

    def tidy(self) -> None:
        """After a call: free what entered and left with it, while memory is short."""
        if self.short:
            self.blocks.close()


class Calls:
    """Calls of one kind of one engine. ``blocks``: where their arrays lie on the device, the bench's own unless given."""

    def __init__(self, bench: Bench, loaded: Loaded, kind: int, blocks: Blocks | None = None) -> None:
        self.context = loaded.context(kind, bench.stream.handle)
        self._bench, self._loaded, self._kind = bench, loaded, kind
        self._blocks = blocks or bench.blocks
        self._entered: list[NDArray] = []

    def most(self, name: str) -> Dims:
        """The largest shape of an input."""
        return self._loaded.most(name, self._kind)

    def give(self, name: str, array: NDArray) -> None:
        """Copy an input, in its tensor's dtype, to the device; its shape is that of the call."""
        dense = np.ascontiguousarray(array, self._loaded.tensors[name].dtype)
        address = self._blocks.at(name, dense.nbytes)
        self._bench.driver.copy_in(address, dense, self._bench.stream)
        self._entered.append(dense)
        self.context.bind(name, address)
        self.context.shape(name, dense.shape)

    def room(self, name: str, shape: Dims, block: str | None = None) -> int:
        """Bind an output to memory for ``shape``, in the block of its name unless another is given; returns its address."""
        address = self._blocks.at(block or name, self.nbytes(name, shape))
        self.context.bind(name, address)
        return address

    def nbytes(self, name: str, shape: Dims) -> int:
        """Bytes of a tensor of ``shape``."""
        return prod(shape) * self._loaded.tensors[name].dtype.itemsize

    def work(self) -> None:
        """Give the engine its working memory: to be called before each call, for it may have moved."""
        self.context.work_in(*self._bench.scratch(self._loaded.scratch_bytes))

    def fetch(self, shapes: dict[str, Dims]) -> dict[str, NDArray]:
        """Wait for the call, and copy these outputs to the host."""
        found = {}
        for name, shape in shapes.items():
            found[name] = np.empty(shape, self._loaded.tensors[name].dtype)
            self._bench.driver.copy_out(found[name], self._blocks.at(name, 0), self._bench.stream)
        self._bench.stream.synchronize()
        self._entered.clear()
        self._bench.tidy()
        return found

    def whole(self, inputs: dict[str, NDArray], outputs: dict[str, Dims]) -> dict[str, NDArray]:
        """A call from beginning to end. Raises RuntimeError with TensorRT's words."""
        for name, array in inputs.items():
            self.give(name, array)
        for name, shape in outputs.items():
            self.room(name, shape)
        self.work()
        self.context.run()
        return self.fetch(outputs)

"""Calls of an engine: arrays in, arrays out, through device memory whose addresses are set when they change."""

from __future__ import annotations

import threading
from contextlib import suppress
from math import prod

import numpy as np
from numpy.typing import NDArray

from edgevlm.engines.tensorrt.api import ExecutionContext, Loaded
from edgevlm.engines.tensorrt.jobs import Dims
from edgevlm.runtime.cuda.driver import CudaStream, DeviceMemory, Driver, Graph

SCRATCH = "scratch"


class DeviceBlocks:
    """Blocks of one device. What is freed must not be in use by work that is still to be done."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held: dict[str, DeviceMemory] = {}

    def at(self, name: str, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes, not cleared; another one when that is more than ever before."""
        held = self._held.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self._driver.free(self._held.pop(name))
            held = self._held[name] = self._driver.allocate(max(nbytes, 1), mapped=False)
        return held.address

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._held.values())

    def close(self) -> None:
        """Free all of them."""
        while self._held:
            self._driver.free(self._held.popitem()[1])

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may have gone first, at the interpreter's end
            self.close()


class Workspace:
    """What all engines of a backend share: a stream, a block of memory to work in, and memory for what enters and leaves.

    ``lock`` is held for a call: another one would work in the same memory.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.stream, self.lock = driver, driver.stream(), threading.RLock()
        self.blocks, self._scratch, self._most = DeviceBlocks(driver), DeviceBlocks(driver), 1
        self.short = False

    def scratch(self, nbytes: int) -> tuple[int, int]:
        """Address and size of the memory to work in, with ``nbytes`` bytes at least."""
        self._most = max(self._most, nbytes)
        return self._scratch.at(SCRATCH, self._most), self._most

    def release(self) -> None:
        """After a call: free what entered and left with it, while memory is short."""
        if self.short:
            self.blocks.close()


class EngineCalls:
    """Calls of one kind of one engine. ``blocks``: where their arrays lie on the device, the workspace's own unless given."""

    def __init__(self, workspace: Workspace, loaded: Loaded, kind: int, blocks: DeviceBlocks | None = None) -> None:
        self.context = loaded.context(kind, workspace.stream.handle)
        self._workspace, self._loaded, self._kind = workspace, loaded, kind
        self._blocks = blocks or workspace.blocks
        self._entered: list[NDArray] = []

    def most(self, name: str) -> Dims:
        """The largest shape of an input."""
        return self._loaded.most(name, self._kind)

    def give(self, name: str, array: NDArray) -> None:
        """Copy an input, in its tensor's dtype, to the device; its shape is that of the call."""
        dense = np.ascontiguousarray(array, self._loaded.dtypes[name])
        address = self._blocks.at(name, dense.nbytes)
        self._workspace.driver.copy_in(address, dense, self._workspace.stream)
        self._entered.append(dense)
        self.context.bind(name, address)
        self.context.shape(name, dense.shape)

    def output(self, name: str, shape: Dims, block: str | None = None) -> int:
        """Bind an output to memory for ``shape``, in the block of its name unless another is given; returns its address."""
        address = self._blocks.at(block or name, prod(shape) * self._loaded.dtypes[name].itemsize)
        self.context.bind(name, address)
        return address

    def work(self) -> None:
        """Give the engine its working memory: to be called before each call, for it may have moved."""
        self.context.work_in(*self._workspace.scratch(self._loaded.scratch_bytes))

    def fetch(self, shapes: dict[str, Dims]) -> dict[str, NDArray]:
        """Wait for the call, and copy these outputs to the host."""
        found = {}
        for name, shape in shapes.items():
            found[name] = np.empty(shape, self._loaded.dtypes[name])
            self._workspace.driver.copy_out(found[name], self._blocks.at(name, 0), self._workspace.stream)
        self._workspace.stream.synchronize()
        self._entered.clear()
        self._workspace.release()
        return found

    def call(self, inputs: dict[str, NDArray], outputs: dict[str, Dims]) -> dict[str, NDArray]:
        """A call from beginning to end. Raises RuntimeError with TensorRT's words."""
        for name, array in inputs.items():
            self.give(name, array)
        for name, shape in outputs.items():
            self.output(name, shape)
        self.work()
        self.context.run()
        return self.fetch(outputs)


class Replayed:
    """Runs a context. The second call in a row with the same addresses and shapes is recorded, those after it replay that.

    The first goes without, because TensorRT has work to put off until a call that follows a change. A graph is good for one
    version of its context, and a context has one graph: what a graph holds of it is gone when its shapes change. Where a call
    cannot be recorded none is.
    """

    def __init__(self, driver: Driver, stream: CudaStream, context: ExecutionContext) -> None:
        self._driver, self._stream, self._context = driver, stream, context
        self._graph: Graph | None = None
        self._version = -1  # of the context when it last ran
        self._refused = False
        self.recorded = self.replayed = 0

    def run(self) -> None:
        """Ask the stream for the call. Raises RuntimeError with TensorRT's words."""
        if self._version != self._context.version:
            self._forget()
            self._version = self._context.version
            self._context.run()
            return
        if self._graph is None and not self._refused:
            try:
                self._graph = self._driver.record(self._context.run, self._stream)
                self.recorded += 1
            except RuntimeError:
                self._refused = True
        if self._graph is None:
            self._context.run()
        else:
            self.replayed += 1
            self._driver.replay(self._graph, self._stream)

    def _forget(self) -> None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            graph.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self._forget()

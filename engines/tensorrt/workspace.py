"""Calls of an engine: arrays in, arrays out, through device memory that grows as it is needed."""

from __future__ import annotations

import threading
from math import prod

import numpy as np
from numpy.typing import NDArray

from edgevlm.engines.tensorrt.api import Loaded
from edgevlm.engines.tensorrt.jobs import Dims
from edgevlm.runtime.cuda.driver import Driver, WorkingMemory

SCRATCH = "scratch"


class Workspace(WorkingMemory):
    """What all engines of a backend share: a stream, and blocks of memory for one call at a time.

    ``lock`` is held for a call.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.stream, self.lock = driver, driver.stream(), threading.RLock()
        super().__init__(driver, self.stream)

    def at(self, name: str, nbytes: int) -> int:
        """The address of a block."""
        return self.block(name, nbytes).address


class EngineCalls:
    """Calls of one kind of one engine."""

    def __init__(self, workspace: Workspace, loaded: Loaded, kind: int) -> None:
        self.context = loaded.context(kind, workspace.stream.handle)
        self._workspace, self._loaded, self._kind = workspace, loaded, kind

    def most(self, name: str) -> Dims:
        """The largest shape of an input."""
        return self._loaded.most(name, self._kind)

    def output(self, name: str, shape: Dims, block: str | None = None) -> int:
        """Bind an output to memory for ``shape``, in the block of its name unless another is given; returns its address."""
        address = self._workspace.at(block or name, prod(shape) * self._loaded.dtypes[name].itemsize)
        self.context.bind(name, address)
        return address

    def call(self, inputs: dict[str, NDArray], outputs: dict[str, Dims]) -> None:
        """Ask the stream for a call with copies of ``inputs``. Raises RuntimeError with TensorRT's words."""
        workspace = self._workspace
        self._entered = [np.ascontiguousarray(array, self._loaded.dtypes[name]) for name, array in inputs.items()]
        for name, dense in zip(inputs, self._entered, strict=True):
            address = workspace.at(name, dense.nbytes)
            workspace.driver.copy_in(address, dense, workspace.stream)
            self.context.bind(name, address)
            self.context.shape(name, dense.shape)
        for name, shape in outputs.items():
            self.output(name, shape)
        needed = self._loaded.scratch_bytes
        self.context.work_in(workspace.at(SCRATCH, needed), needed)
        self.context.run()

    def fetch(self, shapes: dict[str, Dims]) -> dict[str, NDArray]:
        """Wait for the call, and copy these outputs to the host."""
        found = {name: np.empty(shape, self._loaded.dtypes[name]) for name, shape in shapes.items()}
        for name, array in found.items():
            self._workspace.driver.copy_out(array, self._workspace.at(name, 0), self._workspace.stream)
        self._workspace.stream.synchronize()
        return found

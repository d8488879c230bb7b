"""A CUDA device through pycuda. The context is pushed for each call and popped after it, so that any thread may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pycuda.driver as cuda
from numpy.typing import NDArray

from edgevlm.runtime.cuda.driver import Device, Memory, cuda_version, dense_bytes, dense_rows, no_device, no_room
from edgevlm.runtime.cuda.graphs import Graph, record


class PyCuda:
    """See :class:`edgevlm.runtime.cuda.driver.Driver`."""

    def __init__(self, ordinal: int) -> None:
        cuda.init()
        there = cuda.Device.count()
        if not 0 <= ordinal < there:
            raise no_device(ordinal, there)
        device = cuda.Device(ordinal)
        self._context = device.retain_primary_context()
        self.device = Device(
            name=device.name(),
            compute_capability=device.compute_capability(),
            integrated=bool(device.get_attribute(cuda.device_attribute.INTEGRATED)),
            memory_bytes=int(device.total_memory()),
            cuda=cuda_version(cuda.get_driver_version()),
        )
        self.main = self.stream()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context, as this thread's."""
        self._context.push()
        try:
            yield
        finally:
            self._context.pop()

    def free_bytes(self) -> int:
        with self.inside():
            return int(cuda.mem_get_info()[0])

    def allocate(self, nbytes: int, mapped: bool | None = None) -> Memory:
        with self.inside():
            try:
                if not (self.device.integrated if mapped is None else mapped):
                    own = cuda.mem_alloc(nbytes)
                    return Memory(int(own), nbytes, None, own)
                host = cuda.pagelocked_empty(nbytes, np.uint8, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
            except cuda.MemoryError:
                raise no_room(self.device, nbytes, cuda.mem_get_info()[0]) from None
            return Memory(int(host.base.get_device_pointer()), nbytes, host, host.base)

    def free(self, memory: Memory) -> None:
        with self.inside():
            memory.owner.free()

    def copy_in(self, address: int, array: NDArray, stream: Any = None) -> None:
        if array.size:
            with self.inside():
                cuda.memcpy_htod_async(address, dense_bytes(array), self._own(stream))

    def copy_out(self, array: NDArray, address: int, stream: Any = None) -> None:
        if array.size:
            with self.inside():
                cuda.memcpy_dtoh_async(dense_bytes(array), address, self._own(stream))

    def copy_rows_in(self, address: int, pitch: int, array: NDArray, stream: Any = None) -> None:
        if not array.size:
            return
        call = _rows(array)
        call.set_src_host(array)
        call.set_dst_device(address)
        call.src_pitch, call.dst_pitch = dense_rows(array)[0], pitch
        with self.inside():
            call(self._own(stream))

    def copy_rows_out(self, array: NDArray, address: int, pitch: int, stream: Any = None) -> None:
        if not array.size:
            return
        call = _rows(array)
        call.set_src_device(address)
        call.set_dst_host(array)
        call.src_pitch, call.dst_pitch = pitch, dense_rows(array)[0]
        with self.inside():
            call(self._own(stream))

    def copy(self, to: int, from_: int, nbytes: int, stream: Any = None) -> None:
        with self.inside():
            cuda.memcpy_dtod_async(to, from_, nbytes, self._own(stream))

    def copy_rows(self, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: Any = None) -> None:
        if not (width and rows):
            return
        call = cuda.Memcpy2D()
        call.set_src_device(from_)
        call.set_dst_device(to)
        call.src_pitch, call.dst_pitch, call.width_in_bytes, call.height = from_pitch, to_pitch, width, rows
        with self.inside():
            call(self._own(stream))

    def clear(self, address: int, pitch: int, width: int, rows: int, stream: Any = None) -> None:
        if width and rows:
            with self.inside():
                cuda.memset_d2d8_async(address, pitch, 0, width, rows, self._own(stream))

    def stream(self) -> PyCudaStream:
        with self.inside():
            return PyCudaStream(self, cuda.Stream(1))  # CU_STREAM_NON_BLOCKING

    def event(self) -> PyCudaEvent:
        with self.inside():
            return PyCudaEvent(self, cuda.Event())

    def load(self, image: bytes) -> Any:
        with self.inside():
            return cuda.module_from_buffer(image)

    def function(self, module: Any, name: str) -> Any:
        with self.inside():
            return module.get_function(name)

    def launch(self, function: Any, grid: tuple[int, int, int], block: int, arguments: bytes, stream: Any = None) -> None:
        with self.inside():
            function._launch_kernel(grid, (block, 1, 1), arguments, 0, self._own(stream))

    def record(self, work: Callable[[], None], stream: Any) -> Graph:
        with self.inside():
            return record(stream.handle, work)

    def replay(self, graph: Graph, stream: Any) -> None:
        with self.inside():
            graph.launch(stream.handle)

    def _own(self, stream: Any) -> Any:
        return (stream or self.main).own


class PyCudaStream:
    """See :class:`edgevlm.runtime.cuda.driver.Stream`."""

    def __init__(self, driver: PyCuda, own: Any) -> None:
        self._driver, self.own = driver, own
        self.handle = int(own.handle)

    def synchronize(self) -> None:
        with self._driver.inside():
            self.own.synchronize()


class PyCudaEvent:
    """See :class:`edgevlm.runtime.cuda.driver.Event`."""

    def __init__(self, driver: PyCuda, own: Any) -> None:
        self._driver, self._own = driver, own

    def record(self, stream: Any) -> None:
        with self._driver.inside():
            self._own.record(stream.own)

    def ms_since(self, earlier: PyCudaEvent) -> float:
        with self._driver.inside():
            for event in (earlier, self):
                event._own.synchronize()
            return float(self._own.time_since(earlier._own))


def _rows(array: NDArray) -> Any:
    call = cuda.Memcpy2D()
    call.width_in_bytes, call.height = dense_rows(array)[1], len(array)
    return call

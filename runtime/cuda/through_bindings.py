"""A CUDA device through NVIDIA's own ``cuda.bindings``, of cuda-python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from numpy.typing import NDArray

from edgevlm.runtime.cuda.driver import Device, Memory, cuda_version, dense_bytes, dense_rows, no_device, no_room
from edgevlm.runtime.cuda.graphs import Graph, record


class Bindings:
    """See :class:`edgevlm.runtime.cuda.driver.Driver`."""

    def __init__(self, ordinal: int) -> None:
        checked(cu.cuInit(0))
        there = checked(cu.cuDeviceGetCount())
        if not 0 <= ordinal < there:
            raise no_device(ordinal, there)
        device = checked(cu.cuDeviceGet(ordinal))
        self._context = checked(cu.cuDevicePrimaryCtxRetain(device))
        self._current = threading.local()
        self.device = _describe(device)
        self.main = self.stream()

    def _enter(self) -> None:
        """Make the context this thread's."""
        if not getattr(self._current, "set", False):
            checked(cu.cuCtxSetCurrent(self._context))
            self._current.set = True

    def free_bytes(self) -> int:
        self._enter()
        return int(checked(cu.cuMemGetInfo())[0])

    def allocate(self, nbytes: int, mapped: bool | None = None) -> Memory:
        self._enter()
        try:
            if not (self.device.integrated if mapped is None else mapped):
                return Memory(int(checked(cu.cuMemAlloc(nbytes))), nbytes, None, None)
            start = int(checked(cu.cuMemHostAlloc(nbytes, cu.CU_MEMHOSTALLOC_DEVICEMAP)))
        except OutOfMemory:
            raise no_room(self.device, nbytes, self.free_bytes()) from None
        address = int(checked(cu.cuMemHostGetDevicePointer(start, 0)))
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
        return Memory(address, nbytes, host, start)

    def free(self, memory: Memory) -> None:
        self._enter()
        checked(cu.cuMemFree(memory.address) if memory.owner is None else cu.cuMemFreeHost(memory.owner))

    def copy_in(self, address: int, array: NDArray, stream: Any = None) -> None:
        self._enter()
        source = dense_bytes(array)
        if source.size:
            checked(cu.cuMemcpyHtoDAsync(address, source.ctypes.data, source.size, self._handle(stream)))

    def copy_out(self, array: NDArray, address: int, stream: Any = None) -> None:
        self._enter()
        target = dense_bytes(array)
        if target.size:
            checked(cu.cuMemcpyDtoHAsync(target.ctypes.data, address, target.size, self._handle(stream)))

    def copy_rows_in(self, address: int, pitch: int, array: NDArray, stream: Any = None) -> None:
        if not array.size:
            return
        call = _rows(array)
        call.srcMemoryType, call.srcHost = cu.CUmemorytype.CU_MEMORYTYPE_HOST, array.ctypes.data
        call.dstMemoryType, call.dstDevice = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, address
        call.srcPitch, call.dstPitch = dense_rows(array)[0], pitch
        self._enter()
        checked(cu.cuMemcpy2DAsync(call, self._handle(stream)))

    def copy_rows_out(self, array: NDArray, address: int, pitch: int, stream: Any = None) -> None:
        if not array.size:
            return
        call = _rows(array)
        call.srcMemoryType, call.srcDevice = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, address
        call.dstMemoryType, call.dstHost = cu.CUmemorytype.CU_MEMORYTYPE_HOST, array.ctypes.data
        call.srcPitch, call.dstPitch = pitch, dense_rows(array)[0]
        self._enter()
        checked(cu.cuMemcpy2DAsync(call, self._handle(stream)))

    def copy(self, to: int, from_: int, nbytes: int, stream: Any = None) -> None:
        self._enter()
        checked(cu.cuMemcpyDtoDAsync(to, from_, nbytes, self._handle(stream)))

    def copy_rows(self, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: Any = None) -> None:
        if not (width and rows):
            return
        call = cu.CUDA_MEMCPY2D()
        call.WidthInBytes, call.Height = width, rows
        call.srcMemoryType, call.srcDevice, call.srcPitch = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, from_, from_pitch
        call.dstMemoryType, call.dstDevice, call.dstPitch = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, to, to_pitch
        self._enter()
        checked(cu.cuMemcpy2DAsync(call, self._handle(stream)))

    def clear(self, address: int, pitch: int, width: int, rows: int, stream: Any = None) -> None:
        self._enter()
        if width and rows:
            checked(cu.cuMemsetD2D8Async(address, pitch, 0, width, rows, self._handle(stream)))

    def stream(self) -> BoundStream:
        self._enter()
        return BoundStream(self, checked(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def event(self) -> BoundEvent:
        self._enter()
        return BoundEvent(self, checked(cu.cuEventCreate(0)))

    def load(self, image: bytes) -> Any:
        self._enter()
        return checked(cu.cuModuleLoadData(image))

    def function(self, module: Any, name: str) -> Any:
        self._enter()
        return checked(cu.cuModuleGetFunction(module, name.encode()))

    def launch(self, function: Any, grid: tuple[int, int, int], block: int, arguments: bytes, stream: Any = None) -> None:
        self._enter()
        struct = ctypes.create_string_buffer(arguments, len(arguments))
        first = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        where = self._handle(stream)
        checked(cu.cuLaunchKernel(function, *grid, block, 1, 1, 0, where, ctypes.addressof(first), 0))

    def record(self, work: Callable[[], None], stream: Any) -> Graph:
        self._enter()
        return record(stream.handle, work)

    def replay(self, graph: Graph, stream: Any) -> None:
        self._enter()
        graph.launch(stream.handle)

    def _handle(self, stream: Any) -> int:
        handle: int = (stream or self.main).handle
        return handle


class BoundStream:
    """See :class:`edgevlm.runtime.cuda.driver.Stream`."""

    def __init__(self, driver: Bindings, own: Any) -> None:
        self._driver, self._own = driver, own
        self.handle = int(own)

    def synchronize(self) -> None:
        self._driver._enter()
        checked(cu.cuStreamSynchronize(self._own))


class BoundEvent:
    """See :class:`edgevlm.runtime.cuda.driver.Event`."""

    def __init__(self, driver: Bindings, own: Any) -> None:
        self._driver, self._own = driver, own

    def record(self, stream: Any) -> None:
        self._driver._enter()
        checked(cu.cuEventRecord(self._own, stream.handle))

    def ms_since(self, earlier: BoundEvent) -> float:
        self._driver._enter()
        for event in (earlier, self):
            checked(cu.cuEventSynchronize(event._own))
        return float(checked(cu.cuEventElapsedTime(earlier._own, self._own)))


class OutOfMemory(RuntimeError):
    """The device has not that much memory."""


def checked(answer: tuple) -> Any:
    """What a call of the driver returns after its status; raises RuntimeError, with the driver's words, for a failure."""
    status, *found = answer
    if status != cu.CUresult.CUDA_SUCCESS:
        words = cu.cuGetErrorString(status)[1]
        kind = OutOfMemory if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
        raise kind(f"{status.name}: {words.decode() if isinstance(words, bytes) else 'unknown to the driver'}")
    if len(found) > 1:
        return tuple(found)
    return found[0] if found else None


def _rows(array: NDArray) -> Any:
    call = cu.CUDA_MEMCPY2D()
    call.WidthInBytes, call.Height = dense_rows(array)[1], len(array)
    return call


def _describe(device: Any) -> Device:
    names = cu.CUdevice_attribute
    major, minor, integrated = (
        checked(cu.cuDeviceGetAttribute(attribute, device))
        for attribute in (
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            names.CU_DEVICE_ATTRIBUTE_INTEGRATED,
        )
    )
    return Device(
        name=checked(cu.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
        compute_capability=(major, minor),
        integrated=bool(integrated),
        memory_bytes=int(checked(cu.cuDeviceTotalMem(device))),
        cuda=cuda_version(checked(cu.cuDriverGetVersion())),
    )

"""A CUDA device through its driver's library: memory, copies, streams, events, modules, launches, graphs.

Needs no package: ``libcuda.so.1`` comes with the driver. The device's primary context is used, the one that ONNX Runtime and
TensorRT use too, so that addresses are good in all of them, from any thread. Sizes and pitches are in bytes. Without a stream,
work goes to the driver's own, :attr:`Driver.main`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError

# Every function that is called, with the types of its arguments as cuda.h has them; pointers and handles are c_void_p.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuMemsetD2D8Async": (c_uint64, c_size_t, c_ubyte, c_size_t, c_size_t, c_void_p),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuModuleLoadData": (c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
}
CONSTANTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": 18,
    "CU_MEMHOSTALLOC_DEVICEMAP": 2,
    "CU_MEMORYTYPE_HOST": 1,
    "CU_MEMORYTYPE_DEVICE": 2,
    "CU_STREAM_NON_BLOCKING": 1,
    "CU_STREAM_CAPTURE_MODE_RELAXED": 2,  # what other threads do meanwhile is no error
}


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: ``Height`` rows of ``WidthInBytes`` bytes, each side's ``Pitch`` bytes apart."""

    _side: tuple[tuple[str, Any], ...] = (
        ("XInBytes", c_size_t), ("Y", c_size_t), ("MemoryType", c_int), ("Host", c_void_p), ("Device", c_uint64),
        ("Array", c_void_p), ("Pitch", c_size_t),
    )  # fmt: skip
    _fields_ = (
        *[(f"{side}{name}", kind) for side, fields in (("src", _side), ("dst", _side)) for name, kind in fields],
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


class OutOfMemoryError(RuntimeError):
    """The device has not that much memory."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """What the driver says of a device. integrated: it shares the host's memory, as a Jetson's does."""

    name: str
    compute_capability: tuple[int, int]
    integrated: bool
    memory_bytes: int
    cuda: str  # the newest CUDA that the driver runs, as 13.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A block of memory that a device sees at ``address``, aligned to 256 bytes or more.

    host: uint8 ``[nbytes]``, the same bytes where the block is the host's own, mapped and never copied; else None.
    """

    address: int
    nbytes: int
    host: NDArray[np.uint8] | None = field(repr=False)


class CudaStream:
    """Work that is done in order. handle: the ``CUstream``."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver, self.handle = driver, handle

    def synchronize(self) -> None:
        """Wait until all that was asked of it is done."""
        self._driver.call("cuStreamSynchronize", self.handle)


class Event:
    """A moment in a stream."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver, self._handle = driver, handle

    def record(self, stream: CudaStream) -> None:
        self._driver.call("cuEventRecord", self._handle, stream.handle)

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds on the device from ``earlier`` to this one; waits for both."""
        for event in (earlier, self):
            self._driver.call("cuEventSynchronize", event._handle)
        return float(self._driver.made(c_float, "cuEventElapsedTime", earlier._handle, self._handle))


class Graph:
    """What a stream was asked to do, recorded once and replayed in one call; dropped with :meth:`close`."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver, self.handle = driver, handle

    def close(self) -> None:
        if self.handle:
            self._driver.call("cuGraphExecDestroy", self.handle)
            self.handle = 0


class Driver:
    """One device. Every call raises RuntimeError with the driver's words where it fails, and may come from any thread.

    Raises UserError for a device that is not there.
    """

    def __init__(self, ordinal: int, library: ctypes.CDLL | None = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")
        for name, types in FUNCTIONS.items():
            getattr(self._library, name).argtypes = types
        self._thread, self._context = threading.local(), 0
        self.call("cuInit", 0)
        there = self.made(c_int, "cuDeviceGetCount")
        if not 0 <= ordinal < there:
            raise UserError(f"there is no CUDA device {ordinal}: the driver shows {there}; set CUDA_VISIBLE_DEVICES")
        device = self.made(c_int, "cuDeviceGet", ordinal)
        self.device = self._describe(device)
        self._context = self.made(c_void_p, "cuDevicePrimaryCtxRetain", device)
        self.main = self.stream()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of :data:`FUNCTIONS`, in the device's context."""
        if self._context and not getattr(self._thread, "entered", False):
            self._thread.entered = True
            self.call("cuCtxSetCurrent", self._context)
        if status := getattr(self._library, name)(*arguments):
            words = c_char_p()
            self._library.cuGetErrorString(status, byref(words))
            kind = OutOfMemoryError if status == CONSTANTS["CUDA_ERROR_OUT_OF_MEMORY"] else RuntimeError
            raise kind(f"{name}: {words.value.decode() if words.value else f'error {status}'}")

    def made(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Call a function; returns what it writes to its first argument, a pointer to ``kind``."""
        found = kind()
        self.call(name, byref(found), *arguments)
        return found.value

    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody holds."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def allocate(self, nbytes: int, mapped: bool | None = None) -> DeviceMemory:
        """At least one byte, not cleared; ``mapped`` in the host's memory, unless said so where that is the device's as well.

        Raises UserError where there is not that much.
        """
        try:
            if not (self.device.integrated if mapped is None else mapped):
                return DeviceMemory(self.made(c_uint64, "cuMemAlloc_v2", nbytes), nbytes, None)
            start = self.made(c_void_p, "cuMemHostAlloc", nbytes, CONSTANTS["CU_MEMHOSTALLOC_DEVICEMAP"])
        except OutOfMemoryError:
            raise UserError(
                f"{nbytes / 1e9:.2f} GB of {self.device.name} were asked for and {self.free_bytes() / 1e9:.2f} are free; give "
                "a lower --budget, or end what else uses the device"
            ) from None
        address = self.made(c_uint64, "cuMemHostGetDevicePointer_v2", start, 0)
        return DeviceMemory(address, nbytes, np.ctypeslib.as_array((c_ubyte * nbytes).from_address(start)))

    def free(self, memory: DeviceMemory) -> None:
        if memory.host is None:
            self.call("cuMemFree_v2", memory.address)
        else:
            self.call("cuMemFreeHost", memory.host.ctypes.data)

    def copy_in(self, address: int, array: NDArray, stream: CudaStream | None = None) -> None:
        """A dense array to the device. It may change as soon as the stream is synchronised, not before."""
        if source := _dense(array):
            self.call("cuMemcpyHtoDAsync_v2", address, source, array.nbytes, self._handle(stream))

    def copy_out(self, array: NDArray, address: int, stream: CudaStream | None = None) -> None:
        """From the device to a dense array, complete once the stream is synchronised."""
        if target := _dense(array):
            self.call("cuMemcpyDtoHAsync_v2", target, address, array.nbytes, self._handle(stream))

    def copy_rows_in(self, address: int, pitch: int, array: NDArray, stream: CudaStream | None = None) -> None:
        """``array [rows, ...]``, each row dense, to ``pitch`` bytes apart on the device."""
        own_pitch, width = _dense_rows(array)
        self._copy_2d(
            stream, width, len(array), srcHost=array.ctypes.data, srcPitch=own_pitch, dstDevice=address, dstPitch=pitch
        )

    def copy_rows_out(self, array: NDArray, address: int, pitch: int, stream: CudaStream | None = None) -> None:
        """Rows ``pitch`` bytes apart on the device to ``array [rows, ...]``, each row dense."""
        own_pitch, width = _dense_rows(array)
        self._copy_2d(
            stream, width, len(array), srcDevice=address, srcPitch=pitch, dstHost=array.ctypes.data, dstPitch=own_pitch
        )

    def copy(self, to: int, from_: int, nbytes: int, stream: CudaStream | None = None) -> None:
        """Within the device."""
        self.call("cuMemcpyDtoDAsync_v2", to, from_, nbytes, self._handle(stream))

    def copy_rows(
        self, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: CudaStream | None = None
    ) -> None:
        """Within the device: ``width`` bytes of each of ``rows`` rows."""
        self._copy_2d(stream, width, rows, srcDevice=from_, srcPitch=from_pitch, dstDevice=to, dstPitch=to_pitch)

    def clear(self, address: int, pitch: int, width: int, rows: int, stream: CudaStream | None = None) -> None:
        """Zero ``width`` bytes of each of ``rows`` rows, ``pitch`` apart."""
        if width and rows:
            self.call("cuMemsetD2D8Async", address, pitch, 0, width, rows, self._handle(stream))

    def stream(self) -> CudaStream:
        return CudaStream(self, self.made(c_void_p, "cuStreamCreate", CONSTANTS["CU_STREAM_NON_BLOCKING"]))

    def event(self) -> Event:
        return Event(self, self.made(c_void_p, "cuEventCreate", 0))

    def load(self, image: bytes) -> int:
        """A module: a fatbin, a cubin, or PTX."""
        handle: int = self.made(c_void_p, "cuModuleLoadData", image)
        return handle

    def function(self, module: int, name: str) -> int:
        handle: int = self.made(c_void_p, "cuModuleGetFunction", module, name.encode())
        return handle

    def launch(
        self, function: int, grid: tuple[int, int, int], block: int, arguments: bytes, stream: CudaStream | None = None
    ) -> None:
        """arguments: the bytes of the one struct that each of our kernels takes."""
        struct = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (c_void_p * 1)(ctypes.addressof(struct))
        self.call("cuLaunchKernel", function, *grid, block, 1, 1, 0, self._handle(stream), parameters, None)

    def record(self, work: Callable[[], None], stream: CudaStream) -> Graph:
        """What ``work`` asks of ``stream``, not done now but whenever it is replayed. Raises what ``work`` raises, too."""
        recorded = c_void_p()
        self.call("cuStreamBeginCapture_v2", stream.handle, CONSTANTS["CU_STREAM_CAPTURE_MODE_RELAXED"])
        try:
            try:
                work()
            except BaseException:
                self._library.cuStreamEndCapture(stream.handle, byref(recorded))
                raise
            self.call("cuStreamEndCapture", stream.handle, byref(recorded))
            return Graph(self, self.made(c_void_p, "cuGraphInstantiateWithFlags", recorded, 0))
        finally:
            if recorded:
                self.call("cuGraphDestroy", recorded)

    def replay(self, graph: Graph, stream: CudaStream) -> None:
        """All of it, in order behind what ``stream`` has to do already."""
        self.call("cuGraphLaunch", graph.handle, stream.handle)

    def _copy_2d(self, stream: CudaStream | None, width: int, rows: int, **sides: int) -> None:
        if width and rows:
            kinds = {
                f"{name[:3]}MemoryType": f"CU_MEMORYTYPE_{name[3:].upper()}" for name in sides if not name.endswith("Pitch")
            }
            types = {name: CONSTANTS[kind] for name, kind in kinds.items()}
            call = Memcpy2D(WidthInBytes=width, Height=rows, **sides, **types)
            self.call("cuMemcpy2DAsync_v2", byref(call), self._handle(stream))

    def _describe(self, device: int) -> CudaDevice:
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), device)
        major, minor, integrated = (
            self.made(c_int, "cuDeviceGetAttribute", CONSTANTS[f"CU_DEVICE_ATTRIBUTE_{attribute}"], device)
            for attribute in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "INTEGRATED")
        )
        version = self.made(c_int, "cuDriverGetVersion")
        return CudaDevice(
            name=name.value.decode(),
            compute_capability=(major, minor),
            integrated=bool(integrated),
            memory_bytes=self.made(c_size_t, "cuDeviceTotalMem_v2", device),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
        )

    def _handle(self, stream: CudaStream | None) -> int:
        return (stream or self.main).handle


@cache
def open_driver(ordinal: int = 0) -> Driver:
    """The device of a number, one object for the process.

    Raises UserError, one line, where there is no driver, or no such device.
    """
    try:
        return Driver(ordinal)
    except (AttributeError, OSError, RuntimeError) as error:  # AttributeError: an old driver
        raise UserError(
            f"no CUDA device can be used ({error}); edgevlm doctor says what is missing, --engine onnxruntime-cpu runs without "
            "one"
        ) from error


def _dense(array: NDArray) -> int:
    """Where a dense array lies, 0 for an empty one; raises ValueError for one that is not dense."""
    if not array.flags.c_contiguous:
        raise ValueError("only dense arrays can be copied to or from a device in one piece")
    return array.ctypes.data if array.size else 0


def _dense_rows(array: NDArray) -> tuple[int, int]:
    """(pitch, width) in bytes of ``array [rows, ...]``; raises ValueError where a row is not dense."""
    width = int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize
    if len(array) and not array[0].flags.c_contiguous:
        raise ValueError("each row of what is copied to or from a device must be dense")
    return (array.strides[0] if len(array) > 1 else width), width

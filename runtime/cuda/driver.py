"""A CUDA device through pycuda: memory, copies, streams, events, modules, launches, and graphs, which pycuda lacks.

The device's primary context is used, the one that ONNX Runtime and TensorRT use too, so that addresses are valid in all of
them, from any thread. Sizes and pitches are in bytes. Without a stream, work goes to the driver's own, :attr:`Driver.main`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.packages import needs

CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: calls of other threads meanwhile are no error
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class OutOfMemoryError(RuntimeError):
    """The device does not have that much memory."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as the driver describes it. integrated: it shares the host's memory, as a Jetson's does."""

    name: str
    compute_capability: tuple[int, int]
    integrated: bool
    memory_bytes: int
    cuda: str  # the newest CUDA that the driver runs, as 13.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A block of memory that a device sees at ``address``, aligned to 256 bytes or more.

    host: uint8 ``[nbytes]``, the same bytes if the block is mapped from the host's memory; else None.
    """

    address: int
    nbytes: int
    host: NDArray[np.uint8] | None = field(repr=False)
    owner: Any = field(repr=False, default=None, compare=False)  # pycuda's allocation


class CudaStream:
    """Work that is done in order. handle: the ``CUstream``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        with driver.entered() as cuda:
            self.own = cuda.Stream(NON_BLOCKING)
        self.handle: int = self.own.handle

    def synchronize(self) -> None:
        """Wait until all its work is done."""
        with self._driver.entered():
            self.own.synchronize()


class Event:
    """A moment in a stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        with driver.entered() as cuda:
            self._own = cuda.Event()

    def record(self, stream: CudaStream) -> None:
        with self._driver.entered():
            self._own.record(stream.own)

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds on the device from ``earlier`` to this one; waits for both."""
        with self._driver.entered():
            earlier._own.synchronize()
            self._own.synchronize()
            return float(self._own.time_since(earlier._own))


class Graph:
    """Work of a stream, recorded once and replayed in one call; dropped with :meth:`close`."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver, self.handle = driver, handle

    def close(self) -> None:
        if self.handle:
            self._driver.graph_call("cuGraphExecDestroy", c_void_p(self.handle))
            self.handle = 0


class Driver:
    """One device. Every call raises RuntimeError with the driver's words if it fails, and may come from any thread.

    Raises UserError without pycuda and for a missing device.
    """

    def __init__(self, ordinal: int) -> None:
        with needs("a CUDA device", "cuda"):
            import pycuda  # noqa: F401
        import pycuda.driver as cuda  # ImportError: the machine has no driver

        self._cuda = cuda
        cuda.init()
        there = cuda.Device.count()
        if not 0 <= ordinal < there:
            raise UserError(f"there is no CUDA device {ordinal}: the driver shows {there}; set CUDA_VISIBLE_DEVICES")
        device = cuda.Device(ordinal)
        version = cuda.get_driver_version()
        self.device = CudaDevice(
            name=device.name(),
            compute_capability=device.compute_capability(),
            integrated=bool(device.get_attribute(cuda.device_attribute.INTEGRATED)),
            memory_bytes=device.total_memory(),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
        )
        self._context = device.retain_primary_context()
        weakref.finalize(self, self._context.detach)  # pycuda's destructor would take it for a context of its own
        self._graphs = ctypes.CDLL("libcuda.so.1")  # the library that pycuda has loaded
        self.main = self.stream()

    @contextmanager
    def entered(self) -> Iterator[Any]:
        """Yield pycuda's driver with the device's context current in this thread."""
        cuda = self._cuda
        try:
            self._context.push()
            try:
                yield cuda
            finally:
                cuda.Context.pop()
        except cuda.MemoryError as error:
            raise OutOfMemoryError(str(error)) from None
        except cuda.Error as error:
            raise RuntimeError(str(error)) from None

    def free_bytes(self) -> int:
        """Free bytes of the device's memory."""
        with self.entered() as cuda:
            free: int = cuda.mem_get_info()[0]
            return free

    def allocate(self, nbytes: int, mapped: bool | None = None) -> DeviceMemory:
        """Allocate at least one byte, not cleared; ``mapped`` from the host's memory, by default if the device shares it.

        Raises UserError if there is not that much.
        """
        try:
            with self.entered() as cuda:
                if not (self.device.integrated if mapped is None else mapped):
                    block = cuda.mem_alloc(nbytes)
                    return DeviceMemory(int(block), nbytes, None, block)
                host = cuda.pagelocked_empty(nbytes, np.uint8, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
                return DeviceMemory(int(host.base.get_device_pointer()), nbytes, host, host.base)
        except OutOfMemoryError:
            raise UserError(
                f"{nbytes / 1e9:.2f} GB of {self.device.name} were asked for and {self.free_bytes() / 1e9:.2f} are free; give "
                "a lower --budget, or end what else uses the device"
            ) from None

    def free(self, memory: DeviceMemory) -> None:
        with self.entered():
            memory.owner.free()

    def copy_in(self, address: int, array: NDArray, stream: CudaStream | None = None) -> None:
        """Copy a dense array to the device. It must not change before the stream is synchronised."""
        _check_dense(array)
        if array.size:
            with self.entered() as cuda:
                cuda.memcpy_htod_async(address, array, self._own(stream))

    def copy_out(self, array: NDArray, address: int, stream: CudaStream | None = None) -> None:
        """Copy from the device to a dense array, complete once the stream is synchronised."""
        _check_dense(array)
        if array.size:
            with self.entered() as cuda:
                cuda.memcpy_dtoh_async(array, address, self._own(stream))

    def copy_rows_in(self, address: int, pitch: int, array: NDArray, stream: CudaStream | None = None) -> None:
        """Copy ``array [rows, ...]``, each row dense, to rows ``pitch`` bytes apart on the device."""
        own_pitch, width = _dense_rows(array)
        self._copy_2d(stream, width, len(array), ("host", array, own_pitch), ("device", address, pitch))

    def copy_rows_out(self, array: NDArray, address: int, pitch: int, stream: CudaStream | None = None) -> None:
        """Copy rows ``pitch`` bytes apart on the device to ``array [rows, ...]``, each row dense."""
        own_pitch, width = _dense_rows(array)
        self._copy_2d(stream, width, len(array), ("device", address, pitch), ("host", array, own_pitch))

    def copy(self, to: int, from_: int, nbytes: int, stream: CudaStream | None = None) -> None:
        """Copy within the device."""
        with self.entered() as cuda:
            cuda.memcpy_dtod_async(to, from_, nbytes, self._own(stream))

    def copy_rows(
        self, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: CudaStream | None = None
    ) -> None:
        """Copy ``width`` bytes of each of ``rows`` rows within the device."""
        self._copy_2d(stream, width, rows, ("device", from_, from_pitch), ("device", to, to_pitch))

    def clear(self, address: int, pitch: int, width: int, rows: int, stream: CudaStream | None = None) -> None:
        """Zero ``width`` bytes of each of ``rows`` rows, ``pitch`` apart."""
        if width and rows:
            with self.entered() as cuda:
                cuda.memset_d2d8_async(address, pitch, 0, width, rows, self._own(stream))

    def stream(self) -> CudaStream:
        return CudaStream(self)

    def event(self) -> Event:
        return Event(self)

    def load(self, image: bytes) -> Any:
        """Load a module: a fatbin, a cubin, or PTX."""
        with self.entered() as cuda:
            return cuda.module_from_buffer(image)

    def function(self, module: Any, name: str) -> Any:
        with self.entered():
            return module.get_function(name)

    def launch(
        self, function: Any, grid: tuple[int, int, int], block: int, arguments: bytes, stream: CudaStream | None = None
    ) -> None:
        """arguments: the bytes of the one struct that each of our kernels takes."""
        with self.entered():
            function(np.frombuffer(arguments, np.uint8), grid=grid, block=(block, 1, 1), stream=self._own(stream))

    def record(self, work: Callable[[], None], stream: CudaStream) -> Graph:
        """Record what ``work`` asks of ``stream``; it is done when the graph is replayed. Raises what ``work`` raises, too."""
        handle, recorded, made = c_void_p(stream.handle), c_void_p(), c_void_p()
        self.graph_call("cuStreamBeginCapture_v2", handle, c_int(CAPTURE_RELAXED))
        try:
            try:
                work()
            except BaseException:
                self._graphs.cuStreamEndCapture(handle, byref(recorded))
                raise
            self.graph_call("cuStreamEndCapture", handle, byref(recorded))
            self.graph_call("cuGraphInstantiateWithFlags", byref(made), recorded, c_ulonglong(0))
            return Graph(self, made.value or 0)
        finally:
            if recorded:
                self.graph_call("cuGraphDestroy", recorded)

    def replay(self, graph: Graph, stream: CudaStream) -> None:
        """Repeat a graph's work after what ``stream`` has to do already."""
        self.graph_call("cuGraphLaunch", c_void_p(graph.handle), c_void_p(stream.handle))

    def graph_call(self, name: str, *arguments: Any) -> None:
        """Call a function that pycuda lacks; each argument has its type."""
        with self.entered():
            status = getattr(self._graphs, name)(*arguments)
        if status:
            words = c_char_p()
            self._graphs.cuGetErrorString(status, byref(words))
            raise RuntimeError(f"{name} failed: {words.value.decode() if words.value else f'error {status}'}")

    def _copy_2d(
        self, stream: CudaStream | None, width: int, rows: int, from_: tuple[str, Any, int], to: tuple[str, Any, int]
    ) -> None:
        if width and rows:
            with self.entered() as cuda:
                copy = cuda.Memcpy2D()
                getattr(copy, f"set_src_{from_[0]}")(from_[1])
                getattr(copy, f"set_dst_{to[0]}")(to[1])
                copy.src_pitch, copy.dst_pitch, copy.width_in_bytes, copy.height = from_[2], to[2], width, rows
                copy(self._own(stream))

    def _own(self, stream: CudaStream | None) -> Any:
        return (stream or self.main).own


@cache
def open_driver(ordinal: int = 0) -> Driver:
    """Return the device of a number, one object for the process. Raises UserError, one line, if it cannot be used."""
    try:
        return Driver(ordinal)
    except UserError:
        raise
    except Exception as error:  # an old driver, or none: pycuda's errors have no common base without it
        raise UserError(
            f"no CUDA device can be used ({error}); edgevlm doctor says what is missing, --engine onnxruntime-cpu runs without "
            "one"
        ) from error


def _check_dense(array: NDArray) -> None:
    if not array.flags.c_contiguous:
        raise ValueError("only dense arrays can be copied to or from a device in one piece")


def _dense_rows(array: NDArray) -> tuple[int, int]:
    """(pitch, width) in bytes of ``array [rows, ...]``; raises ValueError if a row is not dense."""
    width = int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize
    if len(array) and not array[0].flags.c_contiguous:
        raise ValueError("each row of what is copied to or from a device must be dense")
    return (array.strides[0] if len(array) > 1 else width), width

"""Use a CUDA device through pycuda: memory, copies and streams.

The device's memory is shared with ONNX Runtime and TensorRT, which can use the same addresses from any thread. Sizes are in
bytes. Copies and kernels run on the stream :attr:`Driver.main` by default.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.packages import needs

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device. ``integrated``: whether the device shares the host's memory, as on a Jetson."""

    name: str
    compute_capability: tuple[int, int]
    integrated: bool
    memory_bytes: int
    cuda: str  # the newest CUDA version that the driver supports, such as 13.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A block of device memory, aligned to at least 256 bytes.

    ``host``: the same bytes as a uint8 array if the block is mapped from host memory, else None.
    """

    address: int
    nbytes: int
    host: NDArray[np.uint8] | None = field(repr=False)
    owner: Any = field(repr=False, default=None, compare=False)  # pycuda's allocation


class CudaStream:
    """A queue of work that the device executes in order. ``handle``: the ``CUstream``. ``own``: pycuda's stream object."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        with driver.entered() as cuda:
            self.own = cuda.Stream(NON_BLOCKING)
        self.handle: int = self.own.handle

    def synchronize(self) -> None:
        with self._driver.entered():
            self.own.synchronize()


class Driver:
    """The driver of one CUDA device. Any thread may call the methods. A failed method raises RuntimeError with CUDA's message.

    Raises UserError if pycuda or the device is missing.
    """

    def __init__(self, ordinal: int) -> None:
        with needs("a CUDA device", "cuda"):
            import pycuda  # noqa: F401
        import pycuda.driver as cuda  # raises ImportError if the machine has no driver

        self._cuda = cuda
        cuda.init()
        there = cuda.Device.count()
        if not 0 <= ordinal < there:
            raise UserError(f"CUDA device {ordinal} not found among {there}; set CUDA_VISIBLE_DEVICES")
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
        weakref.finalize(self, self._context.detach)  # otherwise pycuda's destructor would treat the context as its own
        self.main = self.stream()

    @contextmanager
    def entered(self) -> Iterator[Any]:
        """Make this device the current one in this thread, and yield pycuda's driver."""
        cuda = self._cuda
        try:
            self._context.push()
            try:
                yield cuda
            finally:
                cuda.Context.pop()
        except cuda.Error as error:
            raise RuntimeError(str(error)) from error

    def free_bytes(self) -> int:
        with self.entered() as cuda:
            free: int = cuda.mem_get_info()[0]
            return free

    def allocate(self, nbytes: int, mapped: bool | None = None) -> DeviceMemory:
        """Allocate memory without clearing it. Raises UserError if too little memory is free.

        ``mapped``: whether to map the memory from the host, by default only if the device shares the host's memory.
        """
        try:
            with self.entered() as cuda:
                if not (self.device.integrated if mapped is None else mapped):
                    block = cuda.mem_alloc(nbytes)
                    return DeviceMemory(int(block), nbytes, None, block)
                host = cuda.pagelocked_empty(nbytes, np.uint8, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
                return DeviceMemory(int(host.base.get_device_pointer()), nbytes, host, host.base)
        except RuntimeError as error:
            if not isinstance(error.__cause__, self._cuda.MemoryError):
                raise
            raise UserError(
                f"{self.device.name}: {nbytes / 1e9:.2f} GB requested, but {self.free_bytes() / 1e9:.2f} GB free; give "
                "a lower --budget, or stop other programs on the device"
            ) from None

    def free(self, memory: DeviceMemory) -> None:
        with self.entered():
            memory.owner.free()

    def copy_in(self, address: int, array: NDArray, stream: CudaStream | None = None) -> None:
        """Copy a contiguous array to the device. The array must not change before the stream is synchronised."""
        if array.size:
            with self.entered() as cuda:
                cuda.memcpy_htod_async(address, array, self._own(stream))

    def copy_out(self, array: NDArray, address: int, stream: CudaStream | None = None) -> None:
        """Copy from the device to a contiguous array. The copy is complete once the stream is synchronised."""
        if array.size:
            with self.entered() as cuda:
                cuda.memcpy_dtoh_async(array, address, self._own(stream))

    def copy_rows(
        self,
        to: int | NDArray,
        to_pitch: int,
        from_: int | NDArray,
        from_pitch: int,
        width: int,
        rows: int,
        stream: CudaStream | None = None,
    ) -> None:
        """Copy rows between addresses or arrays.

        ``width``: how many bytes of each row to copy. A pitch is the number of bytes from one row's start to the next.
        """
        if width and rows:
            with self.entered() as cuda:
                copy = cuda.Memcpy2D()
                (copy.set_dst_device if isinstance(to, int) else copy.set_dst_host)(to)
                (copy.set_src_device if isinstance(from_, int) else copy.set_src_host)(from_)
                copy.dst_pitch, copy.src_pitch, copy.width_in_bytes, copy.height = to_pitch, from_pitch, width, rows
                copy(self._own(stream))

    def clear(self, address: int, pitch: int, width: int, rows: int) -> None:
        """Zero the first ``width`` bytes of each row. ``pitch``: the bytes from one row's start to the next."""
        if width and rows:
            with self.entered() as cuda:
                cuda.memset_d2d8_async(address, pitch, 0, width, rows, self.main.own)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    def launch(self, function: Any, grid: tuple[int, int, int], block: int, arguments: bytes) -> None:
        """Launch a pycuda function. ``arguments``: the bytes of the struct that is the kernel's only parameter."""
        with self.entered():
            function(np.frombuffer(arguments, np.uint8), grid=grid, block=(block, 1, 1), stream=self.main.own)

    def _own(self, stream: CudaStream | None) -> Any:
        return (stream or self.main).own


class WorkingMemory:
    """Named blocks of device memory, used by one call at a time. A block that is too small is replaced by a larger one."""

    def __init__(self, driver: Driver, stream: CudaStream) -> None:
        self._driver, self._stream, self._held = driver, stream, dict[str, DeviceMemory]()
        weakref.finalize(self, _free_all, driver, self._held)

    def block(self, name: str, nbytes: int, mapped: bool | None = False) -> DeviceMemory:
        held = self._held.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self._stream.synchronize()  # the old block may still be in use
                self._driver.free(self._held.pop(name))
            held = self._held[name] = self._driver.allocate(max(nbytes, 1), mapped)
        return held


def _free_all(driver: Driver, held: dict[str, DeviceMemory]) -> None:
    while held:
        driver.free(held.popitem()[1])


@cache
def open_driver(ordinal: int = 0) -> Driver:
    """Return a device's driver.

    All calls for a device return the same object. Raises UserError if the device cannot be used.
    """
    try:
        return Driver(ordinal)
    except UserError:
        raise
    except Exception as error:  # with an old or missing driver, pycuda's errors have no common base class
        raise UserError(
            f"no CUDA device can be used ({error}); run edgevlm doctor to see what is missing, or use --engine onnxruntime-cpu"
        ) from error

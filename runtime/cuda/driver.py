"""A CUDA device through its driver: memory, copies, streams, events, modules, launches.

One interface over pycuda or, where that is what is installed, cuda-python; :func:`open_driver` takes the first it finds. The
device's primary context is used, the one that ONNX Runtime and TensorRT use too, so that addresses are good in all of them,
from any thread. Sizes and pitches are in bytes. Without a stream, work goes to the driver's own, :attr:`Driver.main`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.cuda.graphs import Graph

# package -> (module, class) that adapts it
PACKAGES = {
    "pycuda": ("edgevlm.runtime.cuda.through_pycuda", "PyCuda"),
    "cuda.bindings": ("edgevlm.runtime.cuda.through_bindings", "Bindings"),
}


@dataclass(frozen=True, slots=True)
class Device:
    """What the driver says of a device. integrated: it shares the host's memory, as a Jetson's does."""

    name: str
    compute_capability: tuple[int, int]
    integrated: bool
    memory_bytes: int
    cuda: str  # the newest CUDA that the driver runs, as 13.0


@dataclass(frozen=True, slots=True)
class Memory:
    """A block of memory that a device sees at ``address``, aligned to 256 bytes or more.

    host: uint8 ``[nbytes]``, the same bytes where the block is the host's own, mapped and never copied; else None.
    """

    address: int
    nbytes: int
    host: NDArray[np.uint8] | None = field(repr=False)
    owner: Any = field(repr=False)


class Stream(Protocol):
    """Work that is done in order. handle: the ``CUstream``."""

    @property
    def handle(self) -> int: ...

    def synchronize(self) -> None:
        """Wait until all that was asked of it is done."""


class Event(Protocol):
    """A moment in a stream."""

    def record(self, stream: Stream) -> None: ...

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds on the device from ``earlier`` to this one; waits for both."""


class Driver(Protocol):
    """One device. ``arguments`` of a launch are the bytes of the one struct that each of our kernels takes."""

    device: Device
    main: Stream

    def __hash__(self) -> int: ...

    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody holds."""

    def allocate(self, nbytes: int, mapped: bool | None = None) -> Memory:
        """At least one byte, not cleared; ``mapped`` in the host's memory, unless said so where that is the device's as well.

        Raises UserError where there is not that much.
        """

    def free(self, memory: Memory) -> None: ...

    def copy_in(self, address: int, array: NDArray, stream: Stream | None = None) -> None:
        """A dense array to the device. It may change as soon as the stream is synchronised, not before."""

    def copy_out(self, array: NDArray, address: int, stream: Stream | None = None) -> None:
        """From the device to a dense array, complete once the stream is synchronised."""

    def copy_rows_in(self, address: int, pitch: int, array: NDArray, stream: Stream | None = None) -> None:
        """``array [rows, ...]``, each row dense, to ``pitch`` bytes apart on the device."""

    def copy_rows_out(self, array: NDArray, address: int, pitch: int, stream: Stream | None = None) -> None:
        """Rows ``pitch`` bytes apart on the device to ``array [rows, ...]``, each row dense."""

    def copy(self, to: int, from_: int, nbytes: int, stream: Stream | None = None) -> None:
        """Within the device."""

    def copy_rows(
        self, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, rows: int, stream: Stream | None = None
    ) -> None:
        """Within the device: ``width`` bytes of each of ``rows`` rows."""

    def clear(self, address: int, pitch: int, width: int, rows: int, stream: Stream | None = None) -> None:
        """Zero ``width`` bytes of each of ``rows`` rows, ``pitch`` apart."""

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def load(self, image: bytes) -> Any:
        """A module: a fatbin, a cubin, or PTX."""

    def function(self, module: Any, name: str) -> Any: ...

    def launch(
        self, function: Any, grid: tuple[int, int, int], block: int, arguments: bytes, stream: Stream | None = None
    ) -> None: ...

    def record(self, work: Callable[[], None], stream: Stream) -> Graph:
        """What ``work`` asks of ``stream``, not done now, but each time that it is replayed. Raises RuntimeError."""

    def replay(self, graph: Graph, stream: Stream) -> None: ...


def cuda_package() -> str | None:
    """The package that a device would be reached through, or None where neither is installed."""
    return next((name for name in PACKAGES if find_spec(name.partition(".")[0]) and find_spec(name)), None)


@cache
def open_driver(ordinal: int = 0) -> Driver:
    """The device of a number, one object for the process.

    Raises UserError, one line, where no package is installed, there is no driver, or no such device.
    """
    package = cuda_package()
    if package is None:
        raise UserError("CUDA needs pycuda or cuda-python, and neither is installed: pip install pycuda (or cuda-python)")
    module, adapter = PACKAGES[package]
    try:
        driver: Driver = getattr(import_module(module), adapter)(ordinal)
    except UserError:
        raise
    except Exception as error:  # the packages raise classes of their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"no CUDA device can be used ({package}: {reason}); edgevlm doctor says what is missing, --engine onnxruntime-cpu "
            "runs without one"
        ) from error
    return driver


def no_room(device: Device, nbytes: int, free: int) -> UserError:
    """What an adapter raises where ``nbytes`` cannot be had and ``free`` are."""
    return UserError(
        f"{nbytes / 1e9:.2f} GB of {device.name} were asked for and {free / 1e9:.2f} are free; give a lower --budget, or "
        "end what else uses the device"
    )


def no_device(ordinal: int, there: int) -> UserError:
    """What an adapter raises for a device that is not one of those ``there``."""
    return UserError(f"there is no CUDA device {ordinal}: the driver shows {there}; set CUDA_VISIBLE_DEVICES")


def cuda_version(number: int) -> str:
    """13000 as 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def dense_bytes(array: NDArray) -> NDArray[np.uint8]:
    """The bytes of a dense array, uint8 ``[nbytes]``, not copied; raises ValueError for one that is not dense."""
    if not array.flags.c_contiguous:
        raise ValueError("only dense arrays can be copied to or from a device in one piece")
    return array.reshape(-1).view(np.uint8)


def dense_rows(array: NDArray) -> tuple[int, int]:
    """(pitch, width) in bytes of ``array [rows, ...]``; raises ValueError where a row is not dense."""
    width = int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize
    if len(array) and not array[0].flags.c_contiguous:
        raise ValueError("each row of what is copied to or from a device must be dense")
    return (array.strides[0] if len(array) > 1 else width), width

"""CUDA graphs: what a stream was asked to do, recorded once and launched again in one call.

Through the driver's own library, whatever package the rest goes through: pycuda has no graphs. The device's context must be
the calling thread's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: what other threads do meanwhile is no error


class Graph:
    """A recorded graph, ready to be launched; dropped with :meth:`close`."""

    def __init__(self, executable: ctypes.c_void_p) -> None:
        self._executable = executable

    def launch(self, stream: int) -> None:
        """All of it, in order behind what ``stream`` (a ``CUstream``) has to do already. Raises RuntimeError."""
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream))

    def close(self) -> None:
        if self._executable:
            _call("cuGraphExecDestroy", self._executable)
            self._executable = ctypes.c_void_p()


def record(stream: int, work: Callable[[], None]) -> Graph:
    """What ``work`` asks of ``stream``, which is not done now. Raises RuntimeError where it cannot be recorded, and its own."""
    recorded, executable = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(RELAXED))
    try:
        try:
            work()
        finally:
            ended = _library().cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(recorded))
        if ended or not recorded:
            raise RuntimeError(f"cuStreamEndCapture: {_words(ended)}")
        _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), recorded, ctypes.c_ulonglong(0))
    finally:
        if recorded:
            _call("cuGraphDestroy", recorded)
    return Graph(executable)


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name}: {_words(status)}")


def _words(status: int) -> str:
    found = ctypes.c_char_p()
    _library().cuGetErrorString(ctypes.c_int(status), ctypes.byref(found))
    return found.value.decode() if found.value else f"error {status}"

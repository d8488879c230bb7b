"""The adapter on a machine without TensorRT: the fake module in its place, and memory of a fake device for the cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fake_tensorrt
import numpy as np
from fake_cuda import FakeDriver, at
from fake_tensorrt import World

import edgevlm.engines.tensorrt
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import Driver
from edgevlm.runtime.engine import KVBuffer
from edgevlm.runtime.kv import DTYPES

ADAPTER = "edgevlm.engines.tensorrt"


@contextmanager
def faked(version: str) -> Iterator[World]:
    """``tensorrt`` is the fake, of this version, and the adapter is imported anew on it; afterwards neither is left."""
    fake_tensorrt.world.__init__(version)  # type: ignore[misc]
    fake_tensorrt.__version__ = version
    with anew(fake_tensorrt):
        yield fake_tensorrt.world


@contextmanager
def anew(tensorrt: Any) -> Iterator[None]:
    """The adapter is imported anew with this module, or None for a machine without, in the place of ``tensorrt``."""
    before = {name: module for name, module in sys.modules.items() if name == "tensorrt" or name.startswith(ADAPTER)}
    for name in before:
        del sys.modules[name]
    sys.modules["tensorrt"] = tensorrt
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name == "tensorrt" or name.startswith(ADAPTER)]:
            del sys.modules[name]
        sys.modules.update(before)
        edgevlm.engines.tensorrt = sys.modules[ADAPTER]  # type: ignore[assignment]


def build(bundle: Bundle, driver: FakeDriver, capacity: int, **settings: Any) -> list[Any]:
    """What ``edgevlm build`` does."""
    from edgevlm.engines.tensorrt.build import build_engines
    from edgevlm.engines.tensorrt.jobs import BuildSettings

    given: Driver = driver  # type: ignore[assignment]
    return list(build_engines(bundle, BuildSettings(capacity, **settings), given, lambda _: None))


def device_memory(bundle: Bundle, driver: FakeDriver, capacity: int) -> tuple[list[KVBuffer], list[Any], list[Any]]:
    """A buffer a layer in the device's memory, cleared; and keys and values as arrays over it."""
    spec = bundle.decoder
    dtype, shape = DTYPES[spec.kv], (1, spec.kv_heads, capacity, spec.head_dim)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    blocks = [[driver.allocate(nbytes) for _ in range(2)] for _ in range(spec.layers)]
    arrays = [[at(block.address, shape, dtype) for block in pair] for pair in blocks]
    for pair in arrays:
        for array in pair:
            array[:] = 0
    buffers = [KVBuffer(key.address, value.address, shape, dtype, (key, value)) for key, value in blocks]
    return buffers, [pair[0] for pair in arrays], [pair[1] for pair in arrays]

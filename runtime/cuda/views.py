"""Keys or values that lie on a device, as policies and primitives are given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime.cuda import calls

if TYPE_CHECKING:
    from edgevlm.runtime.cuda.kernels import Kernels


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """``[kv_heads, n, head_dim]`` in device memory, heads ``capacity`` rows apart; keeps ``owner`` alive.

    :mod:`edgevlm.runtime.kernels` takes it wherever it takes an array of keys or values. All else, indexing too, makes a
    copy in the host's memory.
    """

    address: int
    shape: tuple[int, int, int]
    capacity: int
    dtype: np.dtype
    kernels: Kernels = field(repr=False)
    owner: object = field(repr=False, default=None)

    def copy(self) -> NDArray:
        """The rows in the host's memory, dense ``[kv_heads, n, head_dim]``."""
        heads, rows, width = self.shape
        out = np.empty(self.shape, self.dtype)
        if out.size:
            driver = self.kernels.driver
            driver.copy_rows_out(out.reshape(heads, rows * width), self.address, self.capacity * width * self.dtype.itemsize)
            driver.main.synchronize()
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self.copy().astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> NDArray:
        return self.copy()[index]

    def __len__(self) -> int:
        return self.shape[0]


def one_layer(rows: DeviceRows) -> NDArray:
    """The table of a call over just these rows, as keys and as values."""
    table = np.zeros(1, calls.LAYER)
    table["key"] = table["value"] = rows.address
    table["capacity"], table["rows"] = rows.capacity, rows.shape[1]
    return table


def require(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise CacheError for anything but an array of this dtype and shape."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise CacheError(f"{name} must be {dtype}, not {getattr(array, 'dtype', type(array).__name__)}")
    if array.shape != shape:
        raise CacheError(f"{name} must be {list(shape)}, not {list(array.shape)}")


def require_rows(name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """The same, and for rows that are not dense."""
    require(name, array, dtype, shape)
    if array.size and array.strides[-1] != dtype.itemsize:
        raise CacheError(f"{name} must be dense in its last axis")

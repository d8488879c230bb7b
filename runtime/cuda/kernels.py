"""The CUDA twins of :mod:`edgevlm.runtime.kernels`, of rows that lie on a device.

Every method takes and returns what the primitive of its name does. What is known of rows comes from the host with each call,
up to 31 bytes a row beside the 512 and more of a row's key and value.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError, UserError
from edgevlm.runtime.cuda import calls, scores
from edgevlm.runtime.cuda.calls import THREADS, TILE, blocks, lanes_of, named, turns_of
from edgevlm.runtime.cuda.driver import Driver
from edgevlm.runtime.cuda.views import DeviceRows, one_layer
from edgevlm.runtime.cuda.workspace import Call, Workspace

IMAGE = "kernels.fatbin"  # built by setup.py where nvcc is
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


def kernel_image() -> bytes:
    """The compiled kernels; raises UserError where edgevlm was installed without nvcc."""
    image = files(__package__).joinpath(IMAGE)
    if not image.is_file():
        raise UserError(
            "edgevlm was installed without its CUDA kernels, because nvcc was not found: put the CUDA toolkit's bin folder on "
            "PATH and run: pip install --force-reinstall --no-deps ."
        )
    return image.read_bytes()


@cache
def _module(driver: Driver) -> Any:
    return driver.load(kernel_image())


@cache
def _function(driver: Driver, name: str) -> Any:
    return driver.function(_module(driver), f"edgevlm_{name}")


class Kernels:
    """Kernels on one driver's main stream, in working memory of their own: one call at a time."""

    def __init__(self, driver: Driver) -> None:
        _module(driver)
        self.driver = driver
        self.space = Workspace(driver)

    infinipot_scores = staticmethod(scores.infinipot_scores)
    infinipot_select = staticmethod(scores.infinipot_select)
    newer_similarity = staticmethod(scores.newer_similarity)
    temporal_similarity = staticmethod(scores.temporal_similarity)

    def launch(self, name: str, grid: tuple[int, int, int], call: ctypes.Structure) -> None:
        """One kernel; nothing for a grid without blocks."""
        if min(grid):
            self.driver.launch(_function(self.driver, name), grid, THREADS, bytes(call))

    def rows(self, width: int, dtype: np.dtype, table: NDArray, address: int) -> ctypes.Structure:
        """What a call needs to know of its rows; table: :data:`calls.LAYER`, at ``address`` on the device."""
        pairs, each = width // 2, 16 // dtype.itemsize
        starts = np.concatenate([table["key"], table["value"]])
        wide = pairs % each == 0 and not (starts % 16).any()
        return calls.Rows(layers=address, heads=0, pairs=pairs, lanes=lanes_of(pairs, each if wide else 1), wide=wide)

    def put_turns(self, call: Call, inv_freq: NDArray[np.float64], pair_axis: NDArray[np.uint8] | None) -> None:
        """The two inputs that :meth:`turns` reads."""
        call.put("turns", turns_of(inv_freq))
        call.put("axis", np.zeros(len(inv_freq), np.uint8) if pair_axis is None else np.ascontiguousarray(pair_axis))

    @staticmethod
    def turns(call: Call, axes: int, *, on: bool = True) -> ctypes.Structure:
        return calls.Turns(turns=call["turns"], axis=call["axis"], axes=axes, on=on)

    def value_norms(self, value: DeviceRows) -> Float32:
        heads, n, width = value.shape
        call = Call(self.space)
        call.room("norm", (heads, n), np.float32)
        table = one_layer(value)
        call.put("layers", table)
        call.lay_out()
        table["norm"], table["norm_stride"] = call["norm"], n
        call.send()
        rows = self.rows(width, value.dtype, table, call["layers"])
        rows.heads = heads
        self.launch(named("value_norms", value.dtype), (blocks(n, rows.lanes), heads, 1), calls.NormsCall(rows=rows))
        return call.fetch("norm")

    def attention_mass(
        self,
        query: Float32,
        query_seq: NDArray[np.int64],
        key: DeviceRows,
        seq: NDArray[np.int64],
        own_key: Float32 | None = None,
        own_seq: NDArray[np.int64] | None = None,
    ) -> Float32:
        heads, n, width = key.shape
        if len(query) % heads or query.shape[2:] != (width,):
            raise CacheError(f"query must be [a multiple of {heads}, w, {width}], not {list(query.shape)}")
        own = 0 if own_key is None else own_key.shape[1]
        call, queries = Call(self.space), query.shape[1]
        call.put("query", np.ascontiguousarray(query, np.float32))
        call.put("query_seq", np.ascontiguousarray(query_seq, np.int64))
        call.put("seq", np.ascontiguousarray(seq, np.int64))
        call.put("layers", one_layer(key))
        for name, shape in {"scores": (heads, TILE, n + own), "highest": (heads, TILE), "weight": (heads, TILE)}.items():
            call.room(name, shape, np.float32)
        call.room("mass", (heads, n), np.float32, zero=True)
        if own_key is not None and own_seq is not None:
            call.put("own_key", np.ascontiguousarray(own_key, np.float32))
            call.put("own_seq", np.ascontiguousarray(own_seq, np.int64))
            own_layer = np.zeros(1, calls.LAYER)
            call.put("own_layers", own_layer)
            call.lay_out()
            own_layer["key"], own_layer["capacity"], own_layer["rows"] = call["own_key"], own, own
        call.send()
        rows = self.rows(width, key.dtype, one_layer(key), call["layers"])
        rows.heads = heads
        names = ("query", "query_seq", "scores", "highest", "weight", "mass")
        at = calls.AttentionCall(rows=rows, **{name: call[name] for name in names}, columns=n + own, queries=queries)
        at.all = len(query) // heads * queries
        for first in range(0, at.all, TILE):
            at.first, at.column, at.rows.layers, at.seq, at.seq_stride = first, 0, call["layers"], call["seq"], n
            self.launch(named("attention_scores", key.dtype), (-(-n // TILE), heads, 1), at)
            if own:
                at.column, at.rows.layers, at.seq, at.seq_stride = n, call["own_layers"], call["own_seq"], 0
                self.launch("attention_scores_fp32", (-(-own // TILE), heads, 1), at)
                at.rows.layers = call["layers"]
            self.launch("attention_weights", (min(TILE, at.all - first), heads, 1), at)
            self.launch("attention_mass", (blocks(n), heads, 1), at)
        return call.fetch("mass")

    def top_k(self, scores: Float32, seq: NDArray[np.int64], candidates: Bool, k: int) -> Bool:
        """Of scores in the host's memory; policies use the C++ for those, and this within :meth:`infinipot_select`."""
        heads, n = scores.shape
        call = Call(self.space)
        call.put("score", np.ascontiguousarray(scores, np.float32))
        call.put("seq", np.ascontiguousarray(seq, np.int64))
        call.put("candidate", np.ascontiguousarray(candidates, np.bool_))
        call.room("out", (heads, n), np.bool_)
        call.send()
        names = ("score", "seq", "candidate", "out")
        self.launch("top_k", (1, heads, 1), calls.TopCall(**{name: call[name] for name in names}, rows=n, k=k))
        return call.fetch("out")

"""The CUDA twins of :mod:`edgevlm.runtime.kernels`, of rows that lie on a device, and what a cache there needs beside them.

What is known of rows comes from the host with each call, up to 31 bytes a row beside the 512 and more of a row's key and value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError, UserError
from edgevlm.runtime import _native
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.cuda import calls
from edgevlm.runtime.cuda.calls import (
    TILE,
    DeviceCache,
    DeviceRows,
    KernelCall,
    KernelWorkspace,
    LayersCall,
    Masks,
    blocks,
    named,
    one_layer,
)
from edgevlm.runtime.cuda.driver import Driver

FATBIN = "kernels.fatbin"  # built by setup.py where nvcc is
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


def load_fatbin() -> bytes:
    """The compiled kernels; raises UserError where edgevlm was installed without nvcc."""
    fatbin = files(__package__).joinpath(FATBIN)
    if not fatbin.is_file():
        raise UserError(
            "edgevlm was installed without its CUDA kernels, because nvcc was not found: put the CUDA toolkit's bin folder on "
            "PATH and run: pip install --force-reinstall --no-deps ."
        )
    return fatbin.read_bytes()


@cache
def _module(driver: Driver) -> Any:
    return driver.load(load_fatbin())


@cache
def _function(driver: Driver, name: str) -> Any:
    return driver.function(_module(driver), f"edgevlm_{name}")


class Kernels:
    """Kernels on one driver's main stream, in working memory of their own: one call at a time."""

    def __init__(self, driver: Driver) -> None:
        _module(driver)
        self.driver = driver
        self.space = KernelWorkspace(driver)

    def launch(self, name: str, grid: tuple[int, int, int], call: ctypes.Structure) -> None:
        """One kernel; nothing for a grid without blocks."""
        if min(grid):
            self.driver.launch(_function(self.driver, name), grid, calls.THREADS, bytes(call))

    def rows(self, width: int, dtype: np.dtype, table: NDArray, address: int) -> ctypes.Structure:
        """What a call needs to know of its rows; table: :data:`calls.LAYER`, at ``address`` on the device."""
        pairs, each = width // 2, 16 // dtype.itemsize
        starts = np.concatenate([table["key"], table["value"]])
        wide = pairs % each == 0 and not (starts % 16).any()
        return calls.Rows(layers=address, heads=0, pairs=pairs, lanes=calls.lanes_of(pairs, each if wide else 1), wide=wide)

    def put_turns(self, call: KernelCall, inv_freq: NDArray[np.float64], pair_axis: NDArray[np.uint8] | None) -> None:
        """The two inputs that :meth:`turns` reads."""
        call.put("turns", calls.turns_of(inv_freq))
        call.put("axis", np.zeros(len(inv_freq), np.uint8) if pair_axis is None else np.ascontiguousarray(pair_axis))

    @staticmethod
    def turns(call: KernelCall, axes: int, *, on: bool = True) -> ctypes.Structure:
        return calls.Turns(turns=call["turns"], axis=call["axis"], axes=axes, on=on)

    def value_norms(self, value: DeviceRows, scale: None = None) -> Float32:
        heads, n, width = value.shape
        call = KernelCall(self.space)
        call.scratch("norm", (heads, n), np.float32)
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
        scale: None = None,
    ) -> Float32:
        heads, n, width = key.shape
        if len(query) % heads or query.shape[2:] != (width,):
            raise CacheError(f"query must be [a multiple of {heads}, w, {width}], not {list(query.shape)}")
        own = 0 if own_key is None else own_key.shape[1]
        call, queries = KernelCall(self.space), query.shape[1]
        call.put("query", np.ascontiguousarray(query, np.float32))
        call.put("query_seq", np.ascontiguousarray(query_seq, np.int64))
        call.put("seq", np.ascontiguousarray(seq, np.int64))
        call.put("layers", one_layer(key))
        for name, shape in {"scores": (heads, TILE, n + own), "highest": (heads, TILE), "weight": (heads, TILE)}.items():
            call.scratch(name, shape, np.float32)
        call.scratch("mass", (heads, n), np.float32, zero=True)
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

    def infinipot_scores(
        self, cache: DeviceCache, recent: Masks, valid: Masks, *, rotated: bool = False
    ) -> list[tuple[Float32, Float32]]:
        """See :func:`edgevlm.runtime.kernels.infinipot_scores`."""
        if len(recent) != cache.layers or len(valid) != cache.layers:
            wanted = f"recent and valid need one mask for each of the {cache.layers} layers"
            raise CacheError(f"{wanted}, not {len(recent)} and {len(valid)}")
        work = LayersCall(cache, range(cache.layers))
        similarity = _similarity(work, recent, valid, rotated)
        work.call.send()
        complete_norms(work, cache)
        similarity()
        found = work.fetch("similarity")
        return [(similar, norms(cache, layer)) for layer, similar in enumerate(found)]

    def infinipot_select(
        self,
        cache: DeviceCache,
        recent_frames: int,
        distinctive: int,
        target: int,
        windows: Sequence[int],
        thresholds: Sequence[float] = (),
        *,
        keep_recent: bool = True,
        rotated: bool = False,
    ) -> list[Bool]:
        """See :func:`edgevlm.runtime.kernels.infinipot_select`: nothing but the masks comes back from the device."""
        if min(recent_frames, distinctive, target) < 0:
            raise CacheError("cannot choose a negative number of rows or frames")
        if len(thresholds) not in (0, 3):
            raise CacheError(f"there are 3 thresholds, not {len(thresholds)}")
        if not thresholds and len(windows) != cache.layers:
            raise CacheError(f"windows need one number for each of the {cache.layers} layers, not {len(windows)}")
        if bad := set(windows) - {1, 3, 5, 7}:
            raise CacheError(f"window must be 1, 3, 5 or 7, not {min(bad)}")
        work = LayersCall(cache, range(cache.layers))
        kinds = [cache.kind(layer) for layer in work.layers]
        vision = [kind == Kind.VISION for kind in kinds]
        frames = (cache.frame(layer) for layer in work.layers)
        recent = [_native.newest_frames(frame, among, recent_frames) for frame, among in zip(frames, vision, strict=True)]
        similarity = _similarity(work, recent, vision, rotated)
        work.masks("prefix", [kind == Kind.PREFIX for kind in kinds])
        work.know("seq")
        work.call.put("window", np.array(list(windows) or [1] * cache.layers, np.int32))
        work.call.put("thresholds", np.array(list(thresholds) or [0.0] * 3, np.float64))
        pool = _pool(work, "valid")
        work.results(np.bool_, "keep", "open", "chosen")
        work.call.send()
        complete_norms(work, cache)
        names = ("similarity", "pooled", "seq", "prefix", "recent", "keep", "open", "chosen", "thresholds", "window")
        how = {"distinctive": distinctive, "target": target, "keep_recent": keep_recent}
        at = work.at(calls.ChooseCall, *names, vision=work.call["valid"], **how)
        if thresholds:
            work.kernels.launch("choose_window", (1, 1, cache.layers), at)
        similarity()
        pool()
        work.launch("choose_rows", at, over=1)
        return work.fetch("keep")

    def newer_similarity(
        self, cache: DeviceCache, layer: int, valid: Bool, since: int = 0, *, rotated: bool = False
    ) -> Float32:
        """See :func:`edgevlm.runtime.kernels.newer_similarity`; the order of tokens is worked out on the host."""
        if not 0 <= layer < cache.layers:
            raise CacheError(f"there is no layer {layer} in a cache of {cache.layers}")
        check_turned(cache, rotated)
        work = LayersCall(cache, [layer])
        heads, n, seq = cache.kv_heads, work.lengths[0], cache.seq(layer)
        work.masks("valid", [valid])
        order, held, news = np.zeros((heads, n), np.int32), np.zeros(heads, np.int32), np.zeros(heads, np.int32)
        for head in range(heads):
            rows = np.flatnonzero(valid[head])
            rows = rows[np.argsort(seq[head, rows], kind="stable")]
            order[head, : len(rows)], held[head] = rows, len(rows)
            news[head] = np.searchsorted(seq[head, rows], since)
        for name, array in {"order": order, "held": held, "news": news}.items():
            work.call.put(name, array)
        work.know("position")
        work.put_turns()
        work.call.scratch("out", work.total, np.float32, zero=True)
        work.call.scratch("unit", work.total * cache.head_dim, np.float32)
        work.call.send()
        names = ("position", "order", "held", "news", "unit", "out")
        at = work.at(calls.NewerCall, *names, how=work.turns(on=not rotated))
        work.launch("unit_keys", at, of_rows=True)
        work.launch("nearest_newer", at, over=max(1, -(-n // TILE)))
        return work.fetch("out")[0]


def evict(cache: DeviceCache, keep: dict[int, Bool], lengths: NDArray[np.int32]) -> None:
    """Fill the holes of layers from their tails; keep: bool ``[kv_heads, n_l]``, as many of each head, of ``lengths`` rows."""
    work = LayersCall(cache, list(keep), lengths)
    kept = np.array([mask[0].sum() for mask in keep.values()], np.int32)
    moves = max((min(int(m), n - int(m)) for m, n in zip(kept, work.lengths, strict=True)), default=0)
    if not moves:
        return
    work.masks("keep", list(keep.values()))
    work.call.put("kept", kept)
    work.results(np.int32, "from_", "to")
    work.call.scratch("count", work.tasks, np.int32)
    work.call.send()
    at = work.at(calls.MovesCall, "keep", "kept", "from_", "to", "count")
    work.launch("list_moves", at, over=1)
    work.kernels.launch(
        named("move_rows", cache.dtype),
        (blocks(moves, at.rows.lanes), cache.kv_heads, len(keep)),
        at,
    )
    work.kernels.driver.main.synchronize()


def turn(cache: DeviceCache, by: dict[int, NDArray[np.int32]]) -> None:
    """Turn the keys of layers by so many steps, int32 ``[kv_heads, n_l, axes]``."""
    work = LayersCall(cache, list(by))
    work.call.put("by", *by.values())
    work.put_turns()
    work.call.send()
    work.launch("turn_keys", work.at(calls.TurnCall, "by", how=work.turns(on=True)), of_rows=True)
    work.kernels.driver.main.synchronize()


def complete_norms(work: LayersCall, cache: DeviceCache) -> None:
    """The norms of values that are not known yet, into the arena."""
    if any(cache.known[layer] < n for layer, n in zip(work.layers, work.lengths, strict=True)):
        work.launch("value_norms", work.at(calls.NormsCall), of_rows=True)
        for layer, n in zip(work.layers, work.lengths, strict=True):
            cache.known[layer] = n


def norms(cache: DeviceCache, layer: int) -> Float32:
    """The norms of a layer's values, float32 ``[kv_heads, n_l]``, from the arena."""
    out = np.empty((cache.kv_heads, int(cache.lengths[layer])), np.float32)
    driver = cache.kernels.driver
    driver.copy_rows_out(out, cache.norm_address(layer), int(cache.capacities[layer]) * 4)
    driver.main.synchronize()
    return out


def check_turned(cache: DeviceCache, rotated: bool) -> None:
    """Raise CacheError where keys are to be un-rotated and it is not known which axis turns what."""
    if not rotated and cache.axes > 1 and cache.pair_axis is None:
        raise CacheError(
            f"cannot un-rotate keys with {cache.axes} position axes: open the cache with the sections that each axis turns"
        )


def _similarity(work: LayersCall, recent: Masks, valid: Masks, rotated: bool) -> Callable[[], None]:
    """Names what temporal similarity needs; what it returns launches it, once that is sent."""
    cache = work.cache
    check_turned(cache, rotated)
    work.masks("recent", recent)
    work.masks("valid", valid)
    work.know("position", "row", "col")
    work.put_turns()
    work.results(np.float32, "similarity")
    rows = max((int(mask.sum(1).max(initial=0)) for mask in recent), default=0)
    cells = max((_cells(cache, layer, mask) for layer, mask in zip(work.layers, recent, strict=True)), default=0)
    slots, patches = calls.slots_for(rows), max(1, min(rows, cells))
    for name, size, dtype in (
        ("slots", slots, np.int32), ("count", slots, np.int32), ("latest", slots, np.uint64), ("patches", 1, np.int32),
        ("sum", patches * cache.head_dim, np.int64),
    ):  # fmt: skip
        work.call.scratch(name, work.tasks * size, dtype, zero=True)
    work.call.scratch("patch", work.tasks * slots, np.int32)
    work.call.scratch("mean", work.tasks * patches * cache.head_dim, np.float32)

    def launch() -> None:
        known = ("position", "row", "col", "recent", "valid")
        made = ("slots", "patch", "count", "latest", "patches", "sum", "mean")
        how = {"how": work.turns(on=not rotated), "slot_count": slots, "most_patches": patches, "out": work.call["similarity"]}
        at = work.at(calls.SimilarityCall, *known, *made, **how)
        work.launch("find_patches", at)
        work.launch("add_recent", at, of_rows=True)
        work.launch("finish_means", at, over=min(slots, 64))
        work.launch("temporal_similarity", at, of_rows=True)

    return launch


def _cells(cache: DeviceCache, layer: int, mask: Bool) -> int:
    """How many patches the rows of a mask can have at most, by the rectangle that they lie in."""
    if not mask.any():
        return 0
    row, col = cache.row(layer)[mask].astype(int), cache.col(layer)[mask].astype(int)
    return int((np.ptp(row) + 1) * (np.ptp(col) + 1))


def _pool(work: LayersCall, valid: str) -> Callable[[], None]:
    """The same for the pooled norms of the rows of mask ``valid``, with the windows sent as ``window``."""
    work.know("frame")
    work.results(np.float32, "pooled")
    slots = calls.slots_for(max(work.lengths, default=0))
    for name in ("places", "there"):
        work.call.scratch(name, work.tasks * slots, np.int32, zero=True)

    def launch() -> None:
        others = {"valid": valid, "out": "pooled", "slots": "places", "count": "there"}
        addresses = {name: work.call[key] for name, key in others.items()}
        at = work.at(calls.PoolCall, "frame", "row", "col", "window", slot_count=slots, **addresses)
        work.launch("place_patches", at)
        work.launch("pool_norms", at)

    return launch

"""Run edgevlm's kernels on a CUDA device: those of :mod:`edgevlm.runtime.kernels`, and those that a device cache needs.

The host sends the rows' metadata, up to 31 bytes a row, with each call.
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
from edgevlm.runtime.cuda.calls import TILE, DeviceCache, DeviceRows, KernelCall, Masks, blocks, named
from edgevlm.runtime.cuda.driver import Driver, WorkingMemory

FATBIN = "kernels.fatbin"  # built by setup.py if nvcc is installed
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


def load_fatbin() -> bytes:
    """Return the compiled kernels. Raises UserError if edgevlm was installed without nvcc."""
    fatbin = files(__package__).joinpath(FATBIN)
    if not fatbin.is_file():
        raise UserError(
            "edgevlm was installed without its CUDA kernels, because nvcc was not found: put the CUDA toolkit's bin folder on "
            "PATH and run: pip install --force-reinstall --no-deps ."
        )
    return fatbin.read_bytes()


@cache
def _module(driver: Driver) -> Any:
    with driver.entered() as cuda:
        return cuda.module_from_buffer(load_fatbin())


@cache
def _function(driver: Driver, name: str) -> Any:
    with driver.entered():
        return _module(driver).get_function(f"edgevlm_{name}")


class Kernels:
    """Runs the kernels of one cache, one call at a time, in their own working memory."""

    def __init__(self, driver: Driver) -> None:
        _module(driver)
        self.driver = driver
        self.memory = WorkingMemory(driver, driver.main)

    def launch(self, name: str, grid: tuple[int, int, int], call: ctypes.Structure) -> None:
        if min(grid):
            self.driver.launch(_function(self.driver, name), grid, calls.THREADS, bytes(call))

    def value_norms(self, value: DeviceRows, scale: None = None) -> Float32:
        work = KernelCall(value.cache, [value.layer])
        work.send()
        complete_norms(work)
        return norms(value.cache, value.layer)

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
        work, queries = KernelCall(key.cache, [key.layer]), query.shape[1]
        work.put("query", np.ascontiguousarray(query, np.float32))
        work.put("query_seq", np.ascontiguousarray(query_seq, np.int64))
        work.put("seq", np.ascontiguousarray(seq, np.int64))
        work.make(np.float32, "scores", size=heads * TILE * (n + own))
        work.make(np.float32, "highest", "weight", size=heads * TILE)
        work.make(np.float32, "mass", zero=True)
        if own_key is not None and own_seq is not None:
            work.put("own_key", np.ascontiguousarray(own_key, np.float32))
            work.put("own_seq", np.ascontiguousarray(own_seq, np.int64))
            own_layer = np.zeros(1, calls.LAYER)
            work.put("own_layers", own_layer)
            work.lay_out()
            own_layer["key"], own_layer["capacity"], own_layer["rows"] = work["own_key"], own, own
        work.send()
        at = work.at(calls.AttentionCall, columns=n + own, queries=queries, seq_stride=n, column=0, first=0, all=0)
        at.all = len(query) // heads * queries
        for first in range(0, at.all, TILE):
            at.first, at.column, at.rows.layers, at.seq, at.seq_stride = first, 0, work["layers"], work["seq"], n
            self.launch(named("attention_scores", key.dtype), (-(-n // TILE), heads, 1), at)
            if own:
                at.column, at.rows.layers, at.seq, at.seq_stride = n, work["own_layers"], work["own_seq"], 0
                self.launch("attention_scores_fp32", (-(-own // TILE), heads, 1), at)
                at.rows.layers = work["layers"]
            self.launch("attention_weights", (min(TILE, at.all - first), heads, 1), at)
            self.launch("attention_mass", (blocks(n), heads, 1), at)
        return work.fetch("mass")[0]

    def infinipot_scores(
        self, cache: DeviceCache, recent: Masks, valid: Masks, *, rotated: bool = False
    ) -> list[tuple[Float32, Float32]]:
        """See :func:`edgevlm.runtime.kernels.infinipot_scores`."""
        if len(recent) != cache.layers or len(valid) != cache.layers:
            wanted = f"recent and valid need one mask for each of the {cache.layers} layers"
            raise CacheError(f"{wanted}, not {len(recent)} and {len(valid)}")
        work = KernelCall(cache, range(cache.layers))
        similarity = _similarity(work, recent, valid, rotated)
        work.send()
        complete_norms(work)
        similarity()
        return [(similar, norms(cache, layer)) for layer, similar in enumerate(work.fetch("similarity"))]

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
        """See :func:`edgevlm.runtime.kernels.infinipot_select`. Only the masks are copied back from the device."""
        if min(recent_frames, distinctive, target) < 0:
            raise CacheError("cannot choose a negative number of rows or frames")
        if len(thresholds) not in (0, 3):
            raise CacheError(f"thresholds must be 3 numbers, not {len(thresholds)}")
        if not thresholds and len(windows) != cache.layers:
            raise CacheError(f"windows need one number for each of the {cache.layers} layers, not {len(windows)}")
        if bad := set(windows) - {1, 3, 5, 7}:
            raise CacheError(f"window must be 1, 3, 5 or 7, not {min(bad)}")
        work = KernelCall(cache, range(cache.layers))
        kinds = [cache.kind(layer) for layer in work.layers]
        vision = [kind == Kind.VISION for kind in kinds]
        frames = (cache.frame(layer) for layer in work.layers)
        recent = [_native.newest_frames(frame, among, recent_frames) for frame, among in zip(frames, vision, strict=True)]
        similarity = _similarity(work, recent, vision, rotated)
        work.masks("prefix", [kind == Kind.PREFIX for kind in kinds])
        work.know("seq", "frame")
        work.put("window", np.array(list(windows) or [1] * cache.layers, np.int32))
        work.put("thresholds", np.array(list(thresholds) or [0.0] * 3, np.float64))
        work.make(np.float32, "pooled")
        slots = calls.slots_for(max(work.lengths, default=0))
        work.make(np.int32, "places", "there", size=work.tasks * slots, zero=True)
        work.make(np.bool_, "keep", "open", "chosen")
        work.send()
        complete_norms(work)
        how: dict[str, Any] = {"distinctive": distinctive, "target": target, "keep_recent": keep_recent}
        choice = work.at(calls.ChooseCall, vision=work["valid"], **how)
        pool: dict[str, Any] = {name: work[key] for name, key in {"out": "pooled", "slots": "places", "count": "there"}.items()}
        places = work.at(calls.PoolCall, slot_count=slots, **pool)
        if thresholds:
            self.launch("choose_window", (1, 1, cache.layers), choice)
        similarity()
        work.launch("place_patches", places)
        work.launch("pool_norms", places)
        work.launch("choose_rows", choice, over=1)
        return work.fetch("keep")

    def newer_similarity(
        self, cache: DeviceCache, layer: int, valid: Bool, since: int = 0, *, rotated: bool = False
    ) -> Float32:
        """See :func:`edgevlm.runtime.kernels.newer_similarity`."""
        if not 0 <= layer < cache.layers:
            raise CacheError(f"there is no layer {layer} in a cache of {cache.layers} layers")
        check_turned(cache, rotated)
        work = KernelCall(cache, [layer])
        heads, n, seq = cache.kv_heads, work.lengths[0], cache.seq(layer)
        work.masks("valid", [valid])
        order, held, news = np.zeros((heads, n), np.int32), np.zeros(heads, np.int32), np.zeros(heads, np.int32)
        for head in range(heads):
            rows = np.flatnonzero(valid[head])
            rows = rows[np.argsort(seq[head, rows], kind="stable")]
            order[head, : len(rows)], held[head] = rows, len(rows)
            news[head] = np.searchsorted(seq[head, rows], since)
        for name, array in {"order": order, "held": held, "news": news}.items():
            work.put(name, array)
        work.know("position")
        work.turns()
        work.make(np.float32, "out", zero=True)
        work.make(np.float32, "unit", size=work.total * cache.head_dim)
        work.send()
        at = work.at(calls.NewerCall, turned=not rotated)
        work.launch("unit_keys", at, of_rows=True)
        work.launch("nearest_newer", at, over=max(1, -(-n // TILE)))
        return work.fetch("out")[0]


def evict(cache: DeviceCache, keep: dict[int, Bool], lengths: NDArray[np.int32]) -> None:
    """Evict rows by overwriting them with rows from the end of each layer.

    ``keep``: each layer's mask of rows to keep, bool ``[kv_heads, n]``, with the same number of rows in each head. ``lengths``:
    each layer's number of rows before eviction.
    """
    work = KernelCall(cache, list(keep), [int(lengths[layer]) for layer in keep])
    kept = np.array([mask[0].sum() for mask in keep.values()], np.int32)
    moves = max((min(int(m), n - int(m)) for m, n in zip(kept, work.lengths, strict=True)), default=0)
    if not moves:
        return
    work.masks("keep", list(keep.values()))
    work.put("kept", kept)
    work.make(np.int32, "from_", "to")
    work.make(np.int32, "count", size=work.tasks)
    work.send()
    at = work.at(calls.MovesCall)
    work.launch("list_moves", at, over=1)
    move_rows, grid = named("move_rows", cache.dtype), (blocks(moves, at.rows.lanes), cache.kv_heads, len(keep))
    work.kernels.launch(move_rows, grid, at)
    work.kernels.driver.main.synchronize()


def turn(cache: DeviceCache, by: dict[int, NDArray[np.int32]]) -> None:
    """Rotate keys.

    ``by``: the number of positions by which to rotate each row, int32 ``[kv_heads, n, axes]`` for each layer.
    """
    work = KernelCall(cache, list(by))
    work.put("by", *by.values())
    work.turns()
    work.send()
    work.launch("turn_keys", work.at(calls.TurnCall), of_rows=True)
    work.kernels.driver.main.synchronize()


def complete_norms(work: KernelCall) -> None:
    known = work.cache.known
    if any(known[layer] < n for layer, n in zip(work.layers, work.lengths, strict=True)):
        work.launch("value_norms", work.at(calls.NormsCall), of_rows=True)
        for layer, n in zip(work.layers, work.lengths, strict=True):
            known[layer] = n


def norms(cache: DeviceCache, layer: int) -> Float32:
    """Return the norms of a layer's values, float32 ``[kv_heads, n]``."""
    out = np.empty((cache.kv_heads, int(cache.lengths[layer])), np.float32)
    cache.copy_out(out, layer, cache.address[layer][2])
    return out


def check_turned(cache: DeviceCache, rotated: bool) -> None:
    """Raise CacheError if keys must be un-rotated but the cache does not know the axis of each rotary pair."""
    if not rotated and cache.axes > 1 and cache.pair_axis is None:
        raise CacheError(f"cannot un-rotate keys with {cache.axes} position axes: open the cache with rotary sections")


def _similarity(work: KernelCall, recent: Masks, valid: Masks, rotated: bool) -> Callable[[], None]:
    """Prepare the kernels for temporal similarity, and return a function that launches them."""
    cache = work.cache
    check_turned(cache, rotated)
    work.masks("recent", recent)
    work.masks("valid", valid)
    work.know("position", "row", "col")
    work.turns()
    work.make(np.float32, "similarity")
    rows = max((int(mask.sum(1).max(initial=0)) for mask in recent), default=0)
    cells = max((_cells(cache, layer, mask) for layer, mask in zip(work.layers, recent, strict=True)), default=0)
    slots, patches = calls.slots_for(rows), max(1, min(rows, cells))
    work.make(np.int32, "slots", "count", size=work.tasks * slots, zero=True)
    work.make(np.uint64, "latest", size=work.tasks * slots, zero=True)
    work.make(np.int32, "patches", size=work.tasks, zero=True)
    work.make(np.int64, "sum", size=work.tasks * patches * cache.head_dim, zero=True)
    work.make(np.int32, "patch", size=work.tasks * slots)
    work.make(np.float32, "mean", size=work.tasks * patches * cache.head_dim)

    def launch() -> None:
        sizes = {"slot_count": slots, "most_patches": patches}
        at = work.at(calls.SimilarityCall, turned=not rotated, out=work["similarity"], **sizes)
        work.launch("find_patches", at)
        work.launch("add_recent", at, of_rows=True)
        work.launch("finish_means", at, over=min(slots, 64))
        work.launch("temporal_similarity", at, of_rows=True)

    return launch


def _cells(cache: DeviceCache, layer: int, mask: Bool) -> int:
    if not mask.any():
        return 0
    row, col = cache.row(layer)[mask].astype(int), cache.col(layer)[mask].astype(int)
    return int((np.ptp(row) + 1) * (np.ptp(col) + 1))

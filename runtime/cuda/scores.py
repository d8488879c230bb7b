"""InfiniPot-V and last-seen on a device: what tokens are worth, of all layers and heads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError
from edgevlm.runtime import _native
from edgevlm.runtime.cuda import calls
from edgevlm.runtime.cuda.calls import TILE, slots_for
from edgevlm.runtime.cuda.layers import Held, LayersCall, complete_norms, norms
from edgevlm.runtime.cuda.views import DeviceRows, one_layer
from edgevlm.runtime.kinds import Kind

if TYPE_CHECKING:
    from edgevlm.runtime.cuda.cache import CudaCache
    from edgevlm.runtime.cuda.kernels import Kernels

Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Masks = Sequence[NDArray[np.bool_]]


def infinipot_scores(cache: CudaCache, recent: Masks, valid: Masks, rotated: bool) -> list[tuple[Float32, Float32]]:
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
    return [(alike, norms(cache, layer)) for layer, alike in enumerate(found)]


def infinipot_select(
    cache: CudaCache,
    recent_frames: int,
    distinctive: int,
    target: int,
    windows: Sequence[int],
    thresholds: Sequence[float],
    keep_recent: bool,
    rotated: bool,
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


def newer_similarity(cache: CudaCache, layer: int, valid: Bool, since: int, rotated: bool) -> Float32:
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
    work.call.room("out", work.total, np.float32, zero=True)
    work.call.room("unit", work.total * cache.head_dim, np.float32)
    work.call.send()
    names = ("position", "order", "held", "news", "unit", "out")
    at = work.at(calls.NewerCall, *names, how=work.turns(on=not rotated))
    work.launch("unit_keys", at, of_rows=True)
    work.launch("nearest_newer", at, over=max(1, -(-n // TILE)))
    return work.fetch("out")[0]


@dataclass(frozen=True, slots=True)
class Loose:
    """Keys and what is given of them with a call, as a cache of one layer."""

    keys: DeviceRows
    inv_freq: NDArray[np.float64]
    pair_axis: NDArray[np.uint8] | None
    given: dict[str, NDArray[Any]]  # position, row, col

    @property
    def kernels(self) -> Kernels:
        return self.keys.kernels

    @property
    def dtype(self) -> np.dtype:
        return self.keys.dtype

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def axes(self) -> int:
        return self.given["position"].shape[2]

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([self.keys.shape[1]], np.int32)

    def table(self, wanted: Sequence[int], lengths: NDArray[np.int32]) -> NDArray:
        return one_layer(self.keys)

    def position(self, layer: int) -> NDArray[np.int32]:
        return self.given["position"]

    def row(self, layer: int) -> NDArray[np.int16]:
        return self.given["row"]

    def col(self, layer: int) -> NDArray[np.int16]:
        return self.given["col"]


def temporal_similarity(
    key: DeviceRows,
    position: NDArray[np.int32],
    row: NDArray[np.int16],
    col: NDArray[np.int16],
    recent: Bool,
    valid: Bool,
    inv_freq: NDArray[np.float64],
    *,
    rotated: bool = False,
    pair_axis: NDArray[np.uint8] | None = None,
) -> Float32:
    """See :func:`edgevlm.runtime.kernels.temporal_similarity`."""
    given: dict[str, NDArray[Any]] = {"position": position, "row": row, "col": col}
    work = LayersCall(Loose(key, inv_freq, pair_axis, given), [0])
    launch = _similarity(work, [recent], [valid], rotated)
    work.call.send()
    launch()
    return work.fetch("similarity")[0]


def check_turned(cache: Held, rotated: bool) -> None:
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
    slots, patches = slots_for(rows), max(1, min(rows, cells))
    for name, size, dtype in (
        ("slots", slots, np.int32), ("count", slots, np.int32), ("latest", slots, np.uint64), ("patches", 1, np.int32),
        ("sum", patches * cache.head_dim, np.int64),
    ):  # fmt: skip
        work.call.room(name, work.tasks * size, dtype, zero=True)
    work.call.room("patch", work.tasks * slots, np.int32)
    work.call.room("mean", work.tasks * patches * cache.head_dim, np.float32)

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


def _cells(cache: Held, layer: int, mask: Bool) -> int:
    """How many patches the rows of a mask can have at most, by the rectangle that they lie in."""
    if not mask.any():
        return 0
    row, col = cache.row(layer)[mask].astype(int), cache.col(layer)[mask].astype(int)
    return int((np.ptp(row) + 1) * (np.ptp(col) + 1))


def _pool(work: LayersCall, valid: str) -> Callable[[], None]:
    """The same for the pooled norms of the rows of mask ``valid``, with the windows sent as ``window``."""
    work.know("frame")
    work.results(np.float32, "pooled")
    slots = slots_for(max(work.lengths, default=0))
    for name in ("places", "there"):
        work.call.room(name, work.tasks * slots, np.int32, zero=True)

    def launch() -> None:
        others = {"valid": valid, "out": "pooled", "slots": "places", "count": "there"}
        addresses = {name: work.call[key] for name, key in others.items()}
        at = work.at(calls.PoolCall, "frame", "row", "col", "window", slot_count=slots, **addresses)
        work.launch("place_patches", at)
        work.launch("pool_norms", at)

    return launch

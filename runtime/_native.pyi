from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Mark: ...

class Cache:
    def __init__(
        self,
        capacities: Sequence[int],
        kv_heads: int,
        head_dim: int,
        inv_freq: NDArray[np.float64],
        axes: int,
        dtype: str,
        pair_axis: NDArray[np.uint8] | None,
        key_scale: NDArray[np.float32] | None,
        value_scale: NDArray[np.float32] | None,
        /,
    ) -> None: ...
    @staticmethod
    def bytes_for(
        capacities: Sequence[int],
        kv_heads: int,
        head_dim: int,
        inv_freq: NDArray[np.float64],
        axes: int,
        dtype: str,
        pair_axis: NDArray[np.uint8] | None,
        /,
    ) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def rows_moved(self) -> int: ...
    @property
    def saturated(self) -> int: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def capacities(self) -> NDArray[np.int32]: ...
    @property
    def memory(self) -> NDArray[np.uint8]: ...
    def key_address(self, layer: int, /) -> int: ...
    def value_address(self, layer: int, /) -> int: ...
    def key(self, layer: int, /) -> NDArray[np.number]: ...
    def value(self, layer: int, /) -> NDArray[np.number]: ...
    def key_scale(self, layer: int, /) -> NDArray[np.float32] | None: ...
    def value_scale(self, layer: int, /) -> NDArray[np.float32] | None: ...
    def kind(self, layer: int, /) -> NDArray[np.uint8]: ...
    def seq(self, layer: int, /) -> NDArray[np.int64]: ...
    def frame(self, layer: int, /) -> NDArray[np.int32]: ...
    def row(self, layer: int, /) -> NDArray[np.int16]: ...
    def col(self, layer: int, /) -> NDArray[np.int16]: ...
    def position(self, layer: int, /) -> NDArray[np.int32]: ...
    def confirmed(self, layer: int, /) -> NDArray[np.int32]: ...
    def value_norms(self, layer: int, /) -> NDArray[np.float32]: ...
    def reserve(self, count: int, /) -> None: ...
    def commit(
        self,
        kind: NDArray[np.uint8],
        seq: NDArray[np.int64],
        frame: NDArray[np.int32],
        row: NDArray[np.int16],
        col: NDArray[np.int16],
        position: NDArray[np.int32],
        /,
    ) -> None: ...
    def abort(self) -> None: ...
    def mark(self) -> Mark: ...
    def rollback(self, mark: Mark, /) -> None: ...
    def evict(self, keep: list[NDArray[np.bool_] | None], /) -> int: ...
    def append(
        self,
        layer: int,
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        kind: NDArray[np.uint8],
        seq: NDArray[np.int64],
        frame: NDArray[np.int32],
        row: NDArray[np.int16],
        col: NDArray[np.int16],
        position: NDArray[np.int32],
        /,
    ) -> None: ...
    def shift(self, layer: int, position: NDArray[np.int32], /) -> None: ...
    def reindex(self, prefix: int, /) -> int: ...
    def confirm(self, seq: NDArray[np.int64], frame: int, /) -> None: ...
    def load(
        self,
        layer: int,
        key: NDArray[np.number],
        value: NDArray[np.number],
        kind: NDArray[np.uint8],
        seq: NDArray[np.int64],
        frame: NDArray[np.int32],
        row: NDArray[np.int16],
        col: NDArray[np.int16],
        position: NDArray[np.int32],
        confirmed: NDArray[np.int32],
        /,
    ) -> None: ...

def temporal_similarity(
    key: NDArray[np.number],
    position: NDArray[np.int32],
    row: NDArray[np.int16],
    col: NDArray[np.int16],
    recent: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    inv_freq: NDArray[np.float64],
    pair_axis: NDArray[np.uint8] | None,
    rotated: bool,
    scale: NDArray[np.float32] | None,
    /,
) -> NDArray[np.float32]: ...
def dequantize(stored: NDArray[np.number], scale: NDArray[np.float32] | None, /) -> NDArray[np.float32]: ...
def value_norms(value: NDArray[np.number], scale: NDArray[np.float32] | None, /) -> NDArray[np.float32]: ...
def pool_norms(
    norms: NDArray[np.float32],
    frame: NDArray[np.int32],
    row: NDArray[np.int16],
    col: NDArray[np.int16],
    valid: NDArray[np.bool_],
    window: int,
    /,
) -> NDArray[np.float32]: ...
def top_k(
    scores: NDArray[np.float32], seq: NDArray[np.int64], candidates: NDArray[np.bool_], k: int, /
) -> NDArray[np.bool_]: ...
def index_of(seq: NDArray[np.int64], known: NDArray[np.int64], /) -> NDArray[np.int32]: ...
def join(
    seq: NDArray[np.int64], known: NDArray[np.int64], score: NDArray[np.float32], into: NDArray[np.float32], /
) -> None: ...
def newer_similarity(
    cache: Cache, layer: int, valid: NDArray[np.bool_], since: int, rotated: bool, /
) -> NDArray[np.float32]: ...
def mosaic_assign(
    key: NDArray[np.float32],
    partition: NDArray[np.int32],
    start: int,
    means: NDArray[np.float32],
    variance: NDArray[np.float64],
    size: NDArray[np.int64],
    partitions: NDArray[np.int32],
    small: float,
    large: float,
    rate: float,
    least: int,
    slots: NDArray[np.int32],
    /,
) -> tuple[int, int, int]: ...
def newest_frames(frame: NDArray[np.int32], among: NDArray[np.bool_], count: int, /) -> NDArray[np.bool_]: ...
def attention_mass(
    query: NDArray[np.float32],
    query_seq: NDArray[np.int64],
    key: NDArray[np.number],
    seq: NDArray[np.int64],
    own_key: NDArray[np.float32] | None,
    own_seq: NDArray[np.int64] | None,
    scale: NDArray[np.float32] | None,
    /,
) -> NDArray[np.float32]: ...
def infinipot_scores(
    cache: Cache, recent: list[NDArray[np.bool_]], valid: list[NDArray[np.bool_]], rotated: bool, /
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]: ...
def infinipot_select(
    cache: Cache,
    recent_frames: int,
    distinctive: int,
    target: int,
    windows: list[int],
    thresholds: list[float],
    keep_recent: bool,
    rotated: bool,
    /,
) -> list[NDArray[np.bool_]]: ...
def hash_bits(key: NDArray[np.float32], planes: NDArray[np.float32], /) -> NDArray[np.uint32]: ...
def hash_join(
    keys: NDArray[np.float32],
    places: NDArray[np.float32],
    distance: int,
    key: NDArray[np.float32],
    bits: NDArray[np.uint32],
    count: NDArray[np.int32],
    open: NDArray[np.bool_],
    place: NDArray[np.float32],
    planes: NDArray[np.float32],
    /,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int, int]: ...
def hash_seal(
    keys: NDArray[np.float32],
    places: NDArray[np.float32],
    slot: NDArray[np.int32],
    leaving: NDArray[np.bool_],
    key: NDArray[np.float32],
    bits: NDArray[np.uint32],
    count: NDArray[np.int32],
    open: NDArray[np.bool_],
    place: NDArray[np.float32],
    planes: NDArray[np.float32],
    /,
) -> tuple[NDArray[np.int32], int]: ...
def wicsum(
    query: NDArray[np.float32], key: NDArray[np.float32], count: NDArray[np.int32], share: float, /
) -> NDArray[np.float32]: ...
def levels(pixels: NDArray[np.float32], scale: NDArray[np.float32], offset: NDArray[np.float32], /) -> NDArray[np.uint8]: ...
def patch_sums(levels: NDArray[np.uint8], rows: int, columns: int, /) -> NDArray[np.float32]: ...
def patch_distances(
    levels: NDArray[np.uint8],
    low: NDArray[np.uint8],
    high: NDArray[np.uint8],
    gain: NDArray[np.float32] | None,
    rows: int,
    columns: int,
    /,
) -> NDArray[np.float32]: ...
def read(cache: Cache, /) -> bool: ...
def simd() -> str: ...
def use_simd(name: str, /) -> None: ...
def threads() -> int: ...
def set_threads(count: int, /) -> None: ...
def loose_allocations() -> int: ...

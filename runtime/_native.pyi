"""
The ring cache and its kernels; use edgevlm.runtime.cache and edgevlm.runtime.kernels.
"""
from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
__all__: list[str] = ['Cache', 'Mark', 'RowPart', 'attend', 'attention_mass', 'coreset', 'dequantize', 'hash_bits', 'hash_join', 'hash_seal', 'index_of', 'infinipot_scores', 'infinipot_select', 'join', 'levels', 'loose_allocations', 'mosaic_assign', 'multiplies_codes', 'newer_similarity', 'newest_frames', 'patch_distances', 'patch_sums', 'pool_norms', 'read', 'set_threads', 'simd', 'threads', 'top_k', 'use_simd', 'value_norms', 'wicsum']
class Mark:
    """
    A state of a cache that rollback can restore.
    """
class Cache:
    """
    The keys, values and metadata of one stream; see edgevlm.runtime.cache.KVCache.
    """
    @staticmethod
    def _bytes_for(capacities: collections.abc.Sequence[int], kv_heads: int, head_dim: int, inv_freq: numpy.typing.NDArray[numpy.float64], axes: int, dtype: str, pair_axis: numpy.typing.NDArray[numpy.uint8] | None = None, local: numpy.typing.NDArray[numpy.uint8] | None = None) -> int:
        ...
    def __init__(self, capacities: collections.abc.Sequence[int], kv_heads: int, head_dim: int, inv_freq: numpy.typing.NDArray[numpy.float64], axes: int, dtype: str, pair_axis: numpy.typing.NDArray[numpy.uint8] | None = None, local: numpy.typing.NDArray[numpy.uint8] | None = None, key_scale: numpy.typing.NDArray[numpy.float32] | None = None, value_scale: numpy.typing.NDArray[numpy.float32] | None = None) -> None:
        ...
    def _append(self, layer: int, key: numpy.typing.NDArray[numpy.float32], value: numpy.typing.NDArray[numpy.float32], kind: numpy.typing.NDArray[numpy.uint8], seq: numpy.typing.NDArray[numpy.int64], frame: numpy.typing.NDArray[numpy.int32], row: numpy.typing.NDArray[numpy.int16], col: numpy.typing.NDArray[numpy.int16], position: numpy.typing.NDArray[numpy.int32]) -> None:
        ...
    def _commit(self, kind: numpy.typing.NDArray[numpy.uint8], seq: numpy.typing.NDArray[numpy.int64], frame: numpy.typing.NDArray[numpy.int32], row: numpy.typing.NDArray[numpy.int16], col: numpy.typing.NDArray[numpy.int16], position: numpy.typing.NDArray[numpy.int32]) -> None:
        ...
    def _load(self, layer: int, key: numpy.typing.NDArray[numpy.number], value: numpy.typing.NDArray[numpy.number], kind: numpy.typing.NDArray[numpy.uint8], seq: numpy.typing.NDArray[numpy.int64], frame: numpy.typing.NDArray[numpy.int32], row: numpy.typing.NDArray[numpy.int16], col: numpy.typing.NDArray[numpy.int16], position: numpy.typing.NDArray[numpy.int32], confirmed: numpy.typing.NDArray[numpy.int32]) -> None:
        ...
    def abort(self) -> None:
        """
        Release the reserved rows, and ignore what an engine has written to them.
        """
    def col(self, layer: int) -> numpy.typing.NDArray[numpy.int16]:
        """
        The grid column of each token's patch, [kv_heads, n].
        """
    def confirm(self, seq: numpy.typing.NDArray[numpy.int64], frame: int) -> None:
        """
        Record that the patches of these tokens are unchanged in `frame`. seq: one token per patch, [rows, columns], -1 for none.
        
        Tokens that are no longer in the cache are skipped.
        """
    def confirmed(self, layer: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        The last frame in which each row's patch was unchanged, [kv_heads, n]; see confirm.
        """
    def evict(self, keep: collections.abc.Sequence[numpy.typing.NDArray[numpy.bool] | None]) -> int:
        """
        Evict the rows that are False in the mask keep[layer], bool [kv_heads, n_l]. None keeps all rows of a layer.
        
        Every head of a layer must keep the same number m of rows. The k-th evicted row among the first m rows is replaced by the k-th
        kept row after the first m. Returns the number of evicted rows per head, summed over layers.
        """
    def frame(self, layer: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        The number of each row's frame, [kv_heads, n]; -1 outside frames.
        """
    def key(self, layer: int) -> numpy.typing.NDArray[numpy.number]:
        """
        A layer's rotated keys as stored, [kv_heads, n, head_dim]; codes if the dtype is int8.
        """
    def key_address(self, layer: int) -> int:
        ...
    def key_scale(self, layer: int) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        The factor from int8 codes to keys in each channel, float32 [kv_heads, head_dim]; None with other dtypes.
        """
    def kind(self, layer: int) -> numpy.typing.NDArray[numpy.uint8]:
        """
        Each row's Kind, [kv_heads, n].
        """
    def mark(self) -> Mark:
        """
        Return a mark of the current rows for rollback.
        """
    def position(self, layer: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        The rotary position that each key is rotated to, [kv_heads, n, axes].
        """
    def reindex(self, prefix: int) -> int:
        """
        Close gaps between positions: in each layer and head, a position p >= `prefix` becomes `prefix` + the rank of p.
        
        Equal positions stay equal, and positions below `prefix` do not change (InfiniPot-V App. B.4, HERMES App. F). With 3 axes, each
        axis is treated separately. Returns the next free position: 1 + the largest position over all layers, heads and axes.
        """
    def reserve(self, n: int) -> None:
        """
        Reserve the n rows after each layer's valid rows for an engine to write.
        
        Raises CacheFull, and reserves nothing, if a layer has no room. Raises CacheError if rows are already reserved.
        """
    def rollback(self, mark: Mark) -> None:
        """
        Remove all rows committed since the mark was taken. The mark can be used again.
        
        Raises CacheError if the mark is stale: rows have since been evicted, shifted or added to one layer, or the cache has been
        rolled back to an earlier mark.
        """
    def row(self, layer: int) -> numpy.typing.NDArray[numpy.int16]:
        """
        The grid row of each token's patch, [kv_heads, n].
        """
    def seq(self, layer: int) -> numpy.typing.NDArray[numpy.int64]:
        """
        Each row's place in the stream, [kv_heads, n].
        """
    def shift(self, layer: int, position: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        Set a layer's positions, int32 [kv_heads, n_l, axes], and rotate the keys to the new positions.
        
        The rotary pairs (d, d + head_dim / 2) are rotated in float32 by the float64 angles (new - old) * inv_freq. With 3 axes, each
        pair uses the positions on its own axis.
        """
    def value(self, layer: int) -> numpy.typing.NDArray[numpy.number]:
        """
        A layer's values as stored, [kv_heads, n, head_dim]; codes if the dtype is int8.
        """
    def value_address(self, layer: int) -> int:
        ...
    def value_norms(self, layer: int) -> numpy.typing.NDArray[numpy.float32]:
        """
        Each value's L2 norm, [kv_heads, n], computed once and stored with the row.
        """
    def value_scale(self, layer: int) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        The factor from int8 codes to values in each channel, float32 [kv_heads, head_dim]; None with other dtypes.
        """
    @property
    def allocations(self) -> int:
        """
        The number of memory blocks that the cache has ever allocated: 1.
        """
    @property
    def capacities(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        The number of rows that each layer has room for, [layers].
        """
    @property
    def lengths(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        A copy of each layer's number of valid rows, [layers]. Reserved rows do not count.
        """
    @property
    def memory(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The cache's whole memory block, [nbytes], read-only.
        """
    @property
    def nbytes(self) -> int:
        """
        The cache's size in bytes: rows, metadata and the kernels' working memory.
        """
    @property
    def rows_moved(self) -> int:
        """
        The number of rows that evictions have moved, summed over layers and heads.
        """
    @property
    def saturated(self) -> int:
        """
        The number of values and rotary pairs of keys that exceeded the range of int8 codes; 0 with other dtypes.
        
        A rotary pair counts if it is longer than the largest code, because some rotations of the pair are clipped.
        """
class RowPart:
    """
    The operations from one decoder layer's attention to the next layer's query, key and value, with quantized matrices.
    
    codes, scales and biases each have four arrays, for the matrices output, gate and up, down, and q, k and v. codes are not copied.
    8-bit codes are int8 [in, out] with scales [out], meant for one row at a time; in is a multiple of 16, and out a multiple of 64.
    4-bit codes are uint8 [out, in / 32, 16], two per byte, where 8 stands for 0, with scales [out, in / 32]; in is at least 128, and
    out a multiple of 32. A bias is [out] or None. gains: the weights of the norms after output, after down, of a head's query and of
    its key; None for no norm. block: the size of the Hadamard blocks of down's input. Before each product, rows are rounded to codes
    of -127 to 127, for 4-bit matrices in blocks of 32.
    """
    def __init__(self, codes: collections.abc.Sequence, scales: collections.abc.Sequence, biases: collections.abc.Sequence, gains: collections.abc.Sequence, epsilon: float, kv_heads: int, width: int, block: int) -> None:
        ...
    def run(self, attention: numpy.typing.NDArray[numpy.float32], residual: numpy.typing.NDArray[numpy.float32], cosine: numpy.typing.NDArray[numpy.float32], sine: numpy.typing.NDArray[numpy.float32], query: numpy.typing.NDArray[numpy.float32], key: numpy.typing.NDArray[numpy.float32], value: numpy.typing.NDArray[numpy.float32], next: numpy.typing.NDArray[numpy.float32], threads: int = 0) -> None:
        """
        Compute query, key, value and next (the new residual) of S rows. attention: [S, Hq D]. residual: [S, E]. cosine, sine: [S, D / 2].
        """
    @property
    def any_rows(self) -> bool:
        """
        Whether run suits any number of rows, because all matrices have 4-bit codes.
        """
def attend(query: numpy.typing.NDArray[numpy.float32], key: numpy.typing.NDArray[numpy.float32], value: numpy.typing.NDArray[numpy.float32], keys: numpy.typing.NDArray[numpy.number], values: numpy.typing.NDArray[numpy.number], held: numpy.typing.NDArray[numpy.int32], key_scale: numpy.typing.NDArray[numpy.float32] | None = None, value_scale: numpy.typing.NDArray[numpy.float32] | None = None, *, rows: typing.Any = None, bias: numpy.typing.NDArray[numpy.float32] | None = None, shared: int = 0, previous: numpy.typing.NDArray[numpy.int64] | None = None, until: numpy.typing.NDArray[numpy.int32] | None = None, window: int = 0, place: numpy.typing.NDArray[numpy.int32] | None = None, position: numpy.typing.NDArray[numpy.int32] | None = None, threads: int = 0) -> numpy.typing.NDArray[numpy.float32]:
    """
    Append S rows to a layer's memory, and return their attention output, float32 [S, Hq D].
    
    The output is softmax(q K^T / sqrt(D) + bias) V over the held rows and, causally, the new rows, all as rounded in memory.
    query, key: rotated, [S, Hq D] and [S, Hkv D]. value: [S, Hkv D]. keys, values: the memory, [Hkv, C, D]. held: each head's number
    of rows in memory before the call, int32 [Hkv]; rows [held, held + S) are written. key_scale, value_scale: [Hkv, D], for int8.
    rows: the held rows that each KV head attends to, int32; None for all. bias: [Hkv, C], added to the scores of held rows.
    previous: int64 [Hkv, p], for PureKV's ST-SpAttn (sec. 3.2) on whole frames of p rows. A new row then attends to the held rows
    [0, shared), to its own frame up to itself, and to the row in the same place of the frame before; for the call's first frame, that
    row is given by `previous`, -1 for none. until: how many of the call's rows each new row attends to, at least up to itself, int32
    [S]. window: if above 0, a new row attends to a row outside its frame only if that row's position is above `place` - `window`.
    place: the new rows' positions, int32 [S]. position: the held rows' positions, int32 [Hkv, n]. threads: the number of threads for
    this call; 0 for as many as set_threads allows. Raises CacheError before a byte is changed.
    """
def attention_mass(query: numpy.typing.NDArray[numpy.float32], query_seq: numpy.typing.NDArray[numpy.int64], key: numpy.typing.NDArray[numpy.number], seq: numpy.typing.NDArray[numpy.int64], own_key: numpy.typing.NDArray[numpy.float32] | None = None, own_seq: numpy.typing.NDArray[numpy.int64] | None = None, scale: numpy.typing.NDArray[numpy.float32] | None = None) -> numpy.typing.NDArray[numpy.float32]:
    """
    Return the attention that each cached token receives from w query rows, float32 [H, n].
    
    The attention softmax(q K^T / sqrt(D)) is summed over the query rows and over the query heads of a KV head. A query row attends
    to the tokens whose seq is at most its query_seq; if there are none, the row adds nothing. query: rotated, [heads, w, D].
    query_seq: [w]. key: rotated, [H, n, D]. seq: [H, n]. scale: [H, D], for int8 keys. own_key, own_seq: keys outside the cache,
    [H, m, D] and [m], which the query rows also attend to; the attention that these keys receive is not returned.
    """
def coreset(rows: numpy.typing.NDArray[numpy.float32], count: int, *, diversity: float, directions: int, steps: int) -> numpy.typing.NDArray[numpy.int32]:
    """
    Return the rows of a greedy coreset in the order in which they are taken, int32 [count].
    
    rows: float32 [n, width], finite, of length 1 or less. Row 0 is taken first, then repeatedly the row with the highest score
    1 - c + diversity log(0.01 + r); the lowest row wins ties. c is the row's highest dot product with a taken row, and r is the
    squared length of its part orthogonal to the first `directions` (at most width) independent taken rows. After `steps` rows,
    scores stay as they are and the other rows are taken at once. Takes O(n steps width) time. Raises CacheError if count > n.
    """
def dequantize(stored: numpy.typing.NDArray[numpy.number], scale: numpy.typing.NDArray[numpy.float32] | None) -> numpy.typing.NDArray[numpy.float32]:
    """
    Return a float32 copy of keys or values [H, n, D]. scale: [H, D], for int8 codes.
    """
def hash_bits(key: numpy.typing.NDArray[numpy.float32], planes: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.uint32]:
    """
    Return each key's hash bits, uint32 [H, n]: bit p is set if the dot product with plane p is above 0.
    """
def hash_join(keys: numpy.typing.NDArray[numpy.float32], places: numpy.typing.NDArray[numpy.float32], distance: int, key: numpy.typing.NDArray[numpy.float32], bits: numpy.typing.NDArray[numpy.uint32], count: numpy.typing.NDArray[numpy.int32], open: numpy.typing.NDArray[numpy.bool], place: numpy.typing.NDArray[numpy.float32], planes: numpy.typing.NDArray[numpy.float32]) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], int, int]:
    """
    See edgevlm.runtime.policies.resv.HashClusters.join.
    """
def hash_seal(keys: numpy.typing.NDArray[numpy.float32], places: numpy.typing.NDArray[numpy.float32], slot: numpy.typing.NDArray[numpy.int32], leaving: numpy.typing.NDArray[numpy.bool], key: numpy.typing.NDArray[numpy.float32], bits: numpy.typing.NDArray[numpy.uint32], count: numpy.typing.NDArray[numpy.int32], open: numpy.typing.NDArray[numpy.bool], place: numpy.typing.NDArray[numpy.float32], planes: numpy.typing.NDArray[numpy.float32]) -> tuple[numpy.typing.NDArray[numpy.int32], int]:
    """
    See edgevlm.runtime.policies.resv.HashClusters.seal.
    """
def index_of(seq: numpy.typing.NDArray[numpy.int64], known: numpy.typing.NDArray[numpy.int64]) -> numpy.typing.NDArray[numpy.int32]:
    """
    Return the index in `known` [H, m] of each token of `seq` [H, n], per head, int32 [H, n]; -1 for a missing token.
    
    Tokens may be in any order. If `known` has duplicates, the first one counts. Takes O(n + m) time.
    """
def infinipot_scores(cache: Cache, recent: collections.abc.Sequence[numpy.typing.NDArray[numpy.bool]], valid: collections.abc.Sequence[numpy.typing.NDArray[numpy.bool]], *, rotated: bool = False) -> list[tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]]:
    """
    Return TaR's similarity and the value norm of each row, as one pair (similarity, norms) of float32 [H, n_l] per layer.
    
    recent, valid: masks of the recent frames' rows and of the rows to score, one bool [H, n_l] per layer.
    """
def infinipot_select(cache: Cache, recent_frames: int, distinctive: int, target: int, windows: collections.abc.Sequence[int], thresholds: collections.abc.Sequence[float] = [], *, keep_recent: bool = True, rotated: bool = False) -> list[numpy.typing.NDArray[numpy.bool]]:
    """
    Return masks of the rows that InfiniPot-V (Alg. 1) keeps in each KV head, one bool [H, n_l] per layer.
    
    The prefix and `target` vision rows stay: the `recent_frames` newest frames (if `keep_recent`), then the `distinctive` past rows
    that are least similar by TaR, then the rows with the highest VaN (pool_norms). windows: VaN's window in each layer. thresholds: if
    given, three rising numbers that select the window 7, 5, 3 or 1 by the coefficient of variation of the layer's value norms
    (Alg. 2, lines 16 to 21). The masks are the same as by infinipot_scores, pool_norms and top_k called one after another.
    """
def join(seq: numpy.typing.NDArray[numpy.int64], known: numpy.typing.NDArray[numpy.int64], score: numpy.typing.NDArray[numpy.float32], into: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    Set into[h, i] = score[h, j] wherever seq[h, i] == known[h, j]. seq, into: [H, n]. known, score: [H, m].
    """
def levels(pixels: numpy.typing.NDArray[numpy.float32], scale: numpy.typing.NDArray[numpy.float32], offset: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Return pixels [planes, H, W] * scale [planes] + offset [planes], rounded and clipped to 0..255, uint8 [planes, H, W].
    """
def loose_allocations() -> int:
    """
    Return the number of memory blocks allocated outside caches, for tests.
    """
def mosaic_assign(key: numpy.typing.NDArray[numpy.float32], partition: numpy.typing.NDArray[numpy.int32], start: int, means: numpy.typing.NDArray[numpy.float32], variance: numpy.typing.NDArray[numpy.float64], size: numpy.typing.NDArray[numpy.int64], partitions: numpy.typing.NDArray[numpy.int32], small: float, large: float, rate: float, least: int, slots: numpy.typing.NDArray[numpy.int32]) -> tuple[int, int, int]:
    """
    Assign keys from `start` on to clusters until no slot is free or a cluster must split. Return (row, event, slot).
    """
def multiplies_codes() -> bool:
    """
    Return whether this processor has the 8-bit dot products that RowPart needs (AVX-512 VNNI or NEON's).
    """
def newer_similarity(cache: Cache, layer: int, valid: numpy.typing.NDArray[numpy.bool], since: int = 0, *, rotated: bool = False) -> numpy.typing.NDArray[numpy.float32]:
    """
    Return each token's similarity to the most similar newer token of its layer and head, float32 [H, n_l].
    
    The similarity is the highest cosine between the token's key and the key of a newer token whose seq is at least `since`; -1 if
    there is none. A zero key has cosine 0 with all keys. valid: the rows to compare, bool [H, n_l]; other rows get 0.
    rotated: whether to compare keys as stored instead of un-rotated. Takes O(n m D) time for m tokens from `since` on. Raises
    CacheError if the layer does not exist, or if the cache has 3 position axes but no sections, which un-rotating needs.
    """
def newest_frames(frame: numpy.typing.NDArray[numpy.int32], among: numpy.typing.NDArray[numpy.bool], count: int) -> numpy.typing.NDArray[numpy.bool]:
    """
    Return a mask of the rows of `among` [H, n] in the `count` newest frames over all heads, bool [H, n].
    """
def patch_distances(levels: numpy.typing.NDArray[numpy.uint8], low: numpy.typing.NDArray[numpy.uint8], high: numpy.typing.NDArray[numpy.uint8], rows: int, columns: int, gain: numpy.typing.NDArray[numpy.float32] | None = None) -> numpy.typing.NDArray[numpy.float32]:
    """
    Return the mean of the largest tenth of each patch's distances from the range [low, high], float32 [rows * columns].
    
    levels, low, high: uint8 [planes, H, W]. A patch is H // rows by W // columns pixels of all planes; pixels left over at the right
    and bottom are ignored. gain: [rows * columns], the factor for each patch's low and high, rounded to a multiple of 1/256.
    """
def patch_sums(levels: numpy.typing.NDArray[numpy.uint8], rows: int, columns: int) -> numpy.typing.NDArray[numpy.float32]:
    """
    Return the sum of each patch's levels, float32 [rows * columns]. levels: uint8 [planes, H, W].
    """
def pool_norms(norms: numpy.typing.NDArray[numpy.float32], frame: numpy.typing.NDArray[numpy.int32], row: numpy.typing.NDArray[numpy.int16], col: numpy.typing.NDArray[numpy.int16], valid: numpy.typing.NDArray[numpy.bool], window: int) -> numpy.typing.NDArray[numpy.float32]:
    """
    Pool value norms as InfiniPot-V's VaN: return the mean norm of the window x window patches around each token in its frame.
    
    All arrays are [H, n], and heads are pooled separately. The mean skips missing patches. window: 1, 3, 5 or 7. The result is
    float32, 0 for rows that are not valid. Takes O(n window) time on frames of up to about 60 x 60 patches.
    """
def read(cache: Cache) -> bool:
    """
    Read every byte of the keys and values once, for comparison with the kernels' speed.
    """
def set_threads(count: int) -> None:
    """
    Let kernels use up to `count` threads (1..256), including the calling thread.
    
    Call this before you make a cache, because a cache gets its working memory for the number of threads set when it is made. The
    threads sleep between calls and live as long as the process; a forked child starts its own threads.
    """
def simd() -> str:
    """
    Return the instruction set in use: avx512, avx2, neon or scalar.
    """
def threads() -> int:
    """
    Return the largest number of threads that a kernel may use.
    """
def top_k(scores: numpy.typing.NDArray[numpy.float32], seq: numpy.typing.NDArray[numpy.int64], candidates: numpy.typing.NDArray[numpy.bool], k: int) -> numpy.typing.NDArray[numpy.bool]:
    """
    Return a mask of the k candidates with the highest scores in each head, bool [H, n]; of all if there are fewer than k.
    
    The newer seq wins ties, then the lower row. NaN is lower than every number. Takes O(n) time.
    """
def use_simd(name: str) -> None:
    """
    Select the instruction set, for tests. Raises CacheError if this processor does not have it.
    """
def value_norms(value: numpy.typing.NDArray[numpy.number], scale: numpy.typing.NDArray[numpy.float32] | None = None) -> numpy.typing.NDArray[numpy.float32]:
    """
    Return the L2 norms [H, n] of values [H, n, D]. scale: [H, D], for int8 values.
    """
def wicsum(query: numpy.typing.NDArray[numpy.float32], key: numpy.typing.NDArray[numpy.float32], count: numpy.typing.NDArray[numpy.int32], share: float) -> numpy.typing.NDArray[numpy.float32]:
    """
    See edgevlm.runtime.policies.resv.HashClusters.choose.
    """

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
    A moment of a cache, to roll back to.
    """
class Cache:
    """
    Keys, values and metadata of one stream; see edgevlm.runtime.cache.KVCache.
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
        Forget the reserved rows, and whatever an engine has written there.
        """
    def col(self, layer: int) -> numpy.typing.NDArray[numpy.int16]:
        """
        Each token's patch column, [kv_heads, n].
        """
    def confirm(self, seq: numpy.typing.NDArray[numpy.int64], frame: int) -> None:
        """
        Note that frame shows the same as these tokens: the one of each patch, [rows, columns], -1 for none.
        
        Tokens that are no longer in the memory are skipped.
        """
    def confirmed(self, layer: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        The last frame that showed the same as each row, [kv_heads, n]: its own, or a later one, see confirm.
        """
    def evict(self, keep: collections.abc.Sequence[numpy.typing.NDArray[numpy.bool] | None]) -> int:
        """
        Drop the rows that keep[layer], bool [kv_heads, n_l], excludes; None leaves a layer as it is.
        
        Every head of a layer must keep the same number m of rows. The k-th hole among the first m rows is filled with the k-th kept
        row after them: as many rows move as there are holes. Returns the rows evicted, summed over layers.
        """
    def frame(self, layer: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        Each token's frame, [kv_heads, n].
        """
    def key(self, layer: int) -> numpy.typing.NDArray[numpy.number]:
        """
        Keys as stored, rotated: [kv_heads, n, head_dim], of dtype; codes, if that is int8.
        """
    def key_address(self, layer: int) -> int:
        ...
    def key_scale(self, layer: int) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        The value of 1 in int8 keys, by channel: float32 [kv_heads, head_dim]; None with other dtypes.
        """
    def kind(self, layer: int) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The Kind of each row, [kv_heads, n].
        """
    def mark(self) -> Mark:
        """
        Return this moment, to rollback to.
        """
    def position(self, layer: int) -> numpy.typing.NDArray[numpy.int32]:
        """
        The rotary position each key is rotated to, [kv_heads, n, axes].
        """
    def reindex(self, prefix: int) -> int:
        """
        Make positions dense: in each layer and head, those from prefix on become prefix + their rank.
        
        Rows of one position stay together; positions below prefix stay (InfiniPot-V App. B.4, HERMES App. F). On 3 axes each axis by
        itself. Returns the next free position, 1 + the largest over all layers, heads and axes.
        """
    def reserve(self, n: int) -> None:
        """
        Set aside rows [n_l, n_l + n) of every layer for an engine to write.
        
        Raises CacheFull, with nothing reserved, if a layer has no room; CacheError if rows are reserved already.
        """
    def rollback(self, mark: Mark) -> None:
        """
        Remove all rows committed since mark; it can be used again.
        
        Raises CacheError if the mark is stale: since it was taken rows were evicted or shifted, or appended to one layer, or the rows
        it stands on were rolled back.
        """
    def row(self, layer: int) -> numpy.typing.NDArray[numpy.int16]:
        """
        Each token's patch row, [kv_heads, n].
        """
    def seq(self, layer: int) -> numpy.typing.NDArray[numpy.int64]:
        """
        Each token's place in the stream, [kv_heads, n].
        """
    def shift(self, layer: int, position: numpy.typing.NDArray[numpy.int32]) -> None:
        """
        Give the rows of a layer new positions, int32 [kv_heads, n_l, axes], and rotate their keys to them.
        
        float32 on rotate-half pairs (d, d + head_dim / 2), by float64 angles (new - old) * inv_freq, on 3 axes each pair by its own
        axis.
        """
    def value(self, layer: int) -> numpy.typing.NDArray[numpy.number]:
        """
        Values [kv_heads, n, head_dim], of dtype.
        """
    def value_address(self, layer: int) -> int:
        ...
    def value_norms(self, layer: int) -> numpy.typing.NDArray[numpy.float32]:
        """
        The L2 norm of each value, [kv_heads, n]: kept with the row, so that it is computed once.
        """
    def value_scale(self, layer: int) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        The value of 1 in int8 values, by channel: float32 [kv_heads, head_dim]; None with other dtypes.
        """
    @property
    def allocations(self) -> int:
        """
        Blocks of memory the cache has ever allocated: one.
        """
    @property
    def capacities(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Rows each layer has room for, [layers].
        """
    @property
    def lengths(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Valid rows of each layer, [layers], a copy. Reserved rows do not count.
        """
    @property
    def memory(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The whole block, [nbytes], read-only.
        """
    @property
    def nbytes(self) -> int:
        """
        Every byte of the cache: rows, metadata, and the working memory of its kernels.
        """
    @property
    def rows_moved(self) -> int:
        """
        Rows (of one head) that evictions have moved since the cache was made: never more than they evicted.
        """
    @property
    def saturated(self) -> int:
        """
        Numbers added as int8 that lay beyond their scale; 0 with other dtypes.
        
        Saturated values, and rotary pairs of keys longer than the largest code: some turn of such a pair saturates.
        """
class RowPart:
    """
    The end of a decoder's layer and the projections of the next, with matrices of codes.
    
    codes: of output, gate and up, down, and q, k, v, read where they lie. int8 [in, out], in a multiple of 16, out of 64, scales [out];
    made for one row. Or uint8 [out, in / 32, 16], pairs of 4 bits of which 8 is 0, in from 128, out a multiple of 32, scales [out, in / 32];
    for any number of rows. biases: [out] or None. gains: of the norms after output and down, and of a head's query and key, or None. down
    reads rows in Hadamard blocks. Rows are rounded to codes of -127 to 127 before each product, for 4 bits in blocks of 32.
    """
    def __init__(self, codes: collections.abc.Sequence, scales: collections.abc.Sequence, biases: collections.abc.Sequence, gains: collections.abc.Sequence, epsilon: float, kv_heads: int, width: int, block: int) -> None:
        ...
    def run(self, attention: numpy.typing.NDArray[numpy.float32], residual: numpy.typing.NDArray[numpy.float32], cosine: numpy.typing.NDArray[numpy.float32], sine: numpy.typing.NDArray[numpy.float32], query: numpy.typing.NDArray[numpy.float32], key: numpy.typing.NDArray[numpy.float32], value: numpy.typing.NDArray[numpy.float32], next: numpy.typing.NDArray[numpy.float32], threads: int = 0) -> None:
        """
        Write query, key, value and the new residual of S rows, of the attention [S, Hq D] and residual [S, E] before; cosine and sine [S, D / 2].
        """
    @property
    def any_rows(self) -> bool:
        """
        Whether it is made for many rows: all matrices are of 4 bits.
        """
def attend(query: numpy.typing.NDArray[numpy.float32], key: numpy.typing.NDArray[numpy.float32], value: numpy.typing.NDArray[numpy.float32], keys: numpy.typing.NDArray[numpy.number], values: numpy.typing.NDArray[numpy.number], held: numpy.typing.NDArray[numpy.int32], key_scale: numpy.typing.NDArray[numpy.float32] | None = None, value_scale: numpy.typing.NDArray[numpy.float32] | None = None, *, rows: typing.Any = None, bias: numpy.typing.NDArray[numpy.float32] | None = None, shared: int = 0, previous: numpy.typing.NDArray[numpy.int64] | None = None, until: numpy.typing.NDArray[numpy.int32] | None = None, window: int = 0, place: numpy.typing.NDArray[numpy.int32] | None = None, position: numpy.typing.NDArray[numpy.int32] | None = None, threads: int = 0) -> numpy.typing.NDArray[numpy.float32]:
    """
    Append S rows to a layer's memory and attend from them: float32 [S, Hq D].
    
    query [S, Hq D] and key [S, Hkv D] rotated, value [S, Hkv D]; keys, values [Hkv, C, D], the memory, whose rows [held, held + S) of
    each head are written (held int32 [Hkv]); key_scale, value_scale [Hkv, D], of int8. softmax(q K^T / sqrt(D) + bias) V over the held
    rows and, causally, the new ones, as the memory holds them after rounding. rows: for each KV head the held rows that are seen,
    int32; None for all. bias [Hkv, C] is added to the scores of held rows. previous int64 [Hkv, p]: PureKV's ST-SpAttn (sec. 3.2) for
    whole frames of p rows; a row sees held rows [0, shared), its own frame up to itself and the row at its place in the frame before,
    for the first frame previous (-1: none). until int32 [S]: how many rows of the call each one sees, at least up to itself. window
    above 0: of rows before its frame a row sees those at positions above place - window; place int32 [S], position int32 [Hkv, n] of
    the held rows. threads: those of this call, 0 for as many as set_threads allows. Raises CacheError before a byte is changed.
    """
def attention_mass(query: numpy.typing.NDArray[numpy.float32], query_seq: numpy.typing.NDArray[numpy.int64], key: numpy.typing.NDArray[numpy.number], seq: numpy.typing.NDArray[numpy.int64], own_key: numpy.typing.NDArray[numpy.float32] | None = None, own_seq: numpy.typing.NDArray[numpy.int64] | None = None, scale: numpy.typing.NDArray[numpy.float32] | None = None) -> numpy.typing.NDArray[numpy.float32]:
    """
    Sum the attention that each cached token gets from w rows: float32 [H, n].
    
    query [heads, w, D] and key [H, n, D] rotated; query_seq [w]; seq [H, n]; scale [H, D], of int8 keys. softmax(q K^T / sqrt(D)),
    where a row at stream place query_seq sees the tokens whose seq is not above its own, summed over the w rows and over the query
    heads of each KV head's group. A row that sees nothing adds nothing. own_key [H, m, D], own_seq [m]: keys outside the cache that
    the rows see as well; the attention they get is not returned. Scores take 32 numbers a key at a time.
    """
def coreset(rows: numpy.typing.NDArray[numpy.float32], count: int, *, diversity: float, directions: int, steps: int) -> numpy.typing.NDArray[numpy.int32]:
    """
    The rows of a greedy coreset, in the order in which they are taken: int32 [count].
    
    rows: float32 [n, width], finite, of length 1 or less. The first row is taken first, then always that of the highest
    1 - c + diversity log(0.01 + r), of equal ones the first. c: its highest product with a row taken; r: the square of what is
    orthogonal to the first `directions` (width at most) independent rows taken. After `steps` rows the rest are taken at once, by
    their scores then. O(n steps width). Raises CacheError for more rows than there are.
    """
def dequantize(stored: numpy.typing.NDArray[numpy.number], scale: numpy.typing.NDArray[numpy.float32] | None) -> numpy.typing.NDArray[numpy.float32]:
    """
    Keys or values [H, n, D] as float32, a copy.
    """
def hash_bits(key: numpy.typing.NDArray[numpy.float32], planes: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.uint32]:
    """
    The sides of its planes that each key is on: uint32 [H, n].
    """
def hash_join(keys: numpy.typing.NDArray[numpy.float32], places: numpy.typing.NDArray[numpy.float32], distance: int, key: numpy.typing.NDArray[numpy.float32], bits: numpy.typing.NDArray[numpy.uint32], count: numpy.typing.NDArray[numpy.int32], open: numpy.typing.NDArray[numpy.bool], place: numpy.typing.NDArray[numpy.float32], planes: numpy.typing.NDArray[numpy.float32]) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], int, int]:
    """
    Join rows to clusters: the slot of each [H, n], moves of slots [H, 2 slots], clusters merged, and forced.
    """
def hash_seal(keys: numpy.typing.NDArray[numpy.float32], places: numpy.typing.NDArray[numpy.float32], slot: numpy.typing.NDArray[numpy.int32], leaving: numpy.typing.NDArray[numpy.bool], key: numpy.typing.NDArray[numpy.float32], bits: numpy.typing.NDArray[numpy.uint32], count: numpy.typing.NDArray[numpy.int32], open: numpy.typing.NDArray[numpy.bool], place: numpy.typing.NDArray[numpy.float32], planes: numpy.typing.NDArray[numpy.float32]) -> tuple[numpy.typing.NDArray[numpy.int32], int]:
    """
    Seal the clusters of rows that leave: moves of slots [H, 2 slots], and clusters merged.
    """
def index_of(seq: numpy.typing.NDArray[numpy.int64], known: numpy.typing.NDArray[numpy.int64]) -> numpy.typing.NDArray[numpy.int32]:
    """
    Find each token of seq [H, n] in known [H, m], per head: int32 [H, n], -1 where it is missing.
    
    Both in any order; of equal ones in known the first counts. O(n + m).
    """
def infinipot_scores(cache: Cache, recent: collections.abc.Sequence[numpy.typing.NDArray[numpy.bool]], valid: collections.abc.Sequence[numpy.typing.NDArray[numpy.bool]], *, rotated: bool = False) -> list[tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]]:
    """
    TaR's similarities and the value norms of every layer of a cache, in one call that all threads share.
    
    recent, valid: bool [H, n_l], one a layer. Returns (similarity, norms), float32 [H, n_l], one pair a layer.
    """
def infinipot_select(cache: Cache, recent_frames: int, distinctive: int, target: int, windows: collections.abc.Sequence[int], thresholds: collections.abc.Sequence[float] = [], *, keep_recent: bool = True, rotated: bool = False) -> list[numpy.typing.NDArray[numpy.bool]]:
    """
    InfiniPot-V, Alg. 1, of every layer, each KV head by itself: rows to keep, bool [H, n_l], one mask a layer.
    
    The prefix stays, and of the vision rows the recent_frames newest frames (with keep_recent), distinctive past rows by TaR
    (the least similar first), and by VaN (pool_norms) as many of the others as make it target. windows: VaN's,
    one a layer; with 3 rising thresholds the window is 7, 5, 3 or 1 by the coefficient of variation of the layer's value norms
    (Alg. 2, lines 16 to 21). The same as those functions and top_k one after another, in one call that all threads share, a layer
    at a time; keys are read once, and values once in their life: the cache keeps their norms.
    """
def join(seq: numpy.typing.NDArray[numpy.int64], known: numpy.typing.NDArray[numpy.int64], score: numpy.typing.NDArray[numpy.float32], into: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    Write the score [H, m] of each token of seq [H, n] that is in known [H, m] to its place in into [H, n], per head.
    """
def levels(pixels: numpy.typing.NDArray[numpy.float32], scale: numpy.typing.NDArray[numpy.float32], offset: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.uint8]:
    """
    pixels [planes, H, W] * scale [planes] + offset [planes], to nearest, 0 to 255: uint8 [planes, H, W].
    """
def loose_allocations() -> int:
    """
    Blocks allocated outside caches; for tests.
    """
def mosaic_assign(key: numpy.typing.NDArray[numpy.float32], partition: numpy.typing.NDArray[numpy.int32], start: int, means: numpy.typing.NDArray[numpy.float32], variance: numpy.typing.NDArray[numpy.float64], size: numpy.typing.NDArray[numpy.int64], partitions: numpy.typing.NDArray[numpy.int32], small: float, large: float, rate: float, least: int, slots: numpy.typing.NDArray[numpy.int32]) -> tuple[int, int, int]:
    """
    Assign keys from start on to clusters, until one needs the caller: (row, event, slot), where it stopped and why.
    """
def multiplies_codes() -> bool:
    """
    Whether this processor multiplies 8-bit codes four at a time (AVX-512 VNNI, NEON's dot products), as RowPart does.
    """
def newer_similarity(cache: Cache, layer: int, valid: numpy.typing.NDArray[numpy.bool], since: int = 0, *, rotated: bool = False) -> numpy.typing.NDArray[numpy.float32]:
    """
    The similarity of each token of a layer to the newer token that it is most like: float32 [H, n_l].
    
    Per head the highest cosine of its key with that of a token of larger seq, since or later, both among valid [H, n_l]; -1 where
    there is none, 0 for rows that are not valid. On un-rotated keys (rotated: as stored). A zero vector has cosine 0 with
    everything. O(n m D) for m tokens from since on. Raises CacheError for a missing layer, and for keys on 3 axes that the cache
    does not know how to un-rotate.
    """
def newest_frames(frame: numpy.typing.NDArray[numpy.int32], among: numpy.typing.NDArray[numpy.bool], count: int) -> numpy.typing.NDArray[numpy.bool]:
    """
    Choose the rows of among [H, n] in its count newest frames, taken over all heads: bool [H, n].
    """
def patch_distances(levels: numpy.typing.NDArray[numpy.uint8], low: numpy.typing.NDArray[numpy.uint8], high: numpy.typing.NDArray[numpy.uint8], rows: int, columns: int, gain: numpy.typing.NDArray[numpy.float32] | None = None) -> numpy.typing.NDArray[numpy.float32]:
    """
    How far each patch's levels lie outside [low, high], the mean of the largest tenth: float32 [rows * columns].
    
    levels, low, high: uint8 [planes, H, W]. A patch is H // rows by W // columns pixels of all planes; the rest at the right and
    below belongs to none. gain [rows * columns]: of each patch, low and high are multiplied by it first, in steps of 1/256.
    """
def patch_sums(levels: numpy.typing.NDArray[numpy.uint8], rows: int, columns: int) -> numpy.typing.NDArray[numpy.float32]:
    """
    The sum of each patch of uint8 [planes, H, W]: float32 [rows * columns].
    """
def pool_norms(norms: numpy.typing.NDArray[numpy.float32], frame: numpy.typing.NDArray[numpy.int32], row: numpy.typing.NDArray[numpy.int16], col: numpy.typing.NDArray[numpy.int16], valid: numpy.typing.NDArray[numpy.bool], window: int) -> numpy.typing.NDArray[numpy.float32]:
    """
    InfiniPot-V's VaN pooling: the mean norm of the window x window patches around a token, in its frame.
    
    All [H, n], per head. Absent neighbours are not counted. window: 1, 3, 5 or 7. Returns float32 [H, n], 0 where not valid.
    Sums are in double. O(n window) on frames of up to about 60 x 60 patches.
    """
def read(cache: Cache) -> bool:
    """
    Read every byte of keys and values once: what the kernels' speed is compared with.
    """
def set_threads(count: int) -> None:
    """
    Let kernels use up to count threads, the calling one included (1..256).
    
    Set it before a cache is made: a cache has working memory for as many threads as were set then. The threads sleep between calls
    and live as long as the process; a forked child starts its own.
    """
def simd() -> str:
    """
    The instruction set in use: avx512, avx2, neon or scalar.
    """
def threads() -> int:
    """
    Threads that a kernel may use.
    """
def top_k(scores: numpy.typing.NDArray[numpy.float32], seq: numpy.typing.NDArray[numpy.int64], candidates: numpy.typing.NDArray[numpy.bool], k: int) -> numpy.typing.NDArray[numpy.bool]:
    """
    Choose per head the k candidates of the highest score, or all if there are fewer: bool [H, n].
    
    Of equal scores the newer seq wins, then the lower row. NaN is lower than every number. O(n).
    """
def use_simd(name: str) -> None:
    """
    Use another instruction set from now on; raises CacheError if this processor does not have it. For tests.
    """
def value_norms(value: numpy.typing.NDArray[numpy.number], scale: numpy.typing.NDArray[numpy.float32] | None = None) -> numpy.typing.NDArray[numpy.float32]:
    """
    L2 norms [H, n] of values [H, n, D], whatever their size: InfiniPot-V's VaN. scale: [H, D], of int8.
    """
def wicsum(query: numpy.typing.NDArray[numpy.float32], key: numpy.typing.NDArray[numpy.float32], count: numpy.typing.NDArray[numpy.int32], share: float) -> numpy.typing.NDArray[numpy.float32]:
    """
    ReSV's score of each cluster: float32 [H, slots].
    """

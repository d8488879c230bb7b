"""What a compression costs: each policy beside the same with numpy, and beside one plain read of the keys and values it holds.

A pass is everything a policy does from one compression to the next: its scores, its choice, and the eviction. Guidance
forwards are no part of it; their queries, and those of probed layers, are noise. All three are timed in turn, round by
round, on the same cache, which is filled up again in between. The first round is cold and apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from edgevlm.bench import numpy_kernels
from edgevlm.bench.noise import as_stored, noise_scales
from edgevlm.bench.output import prefixed
from edgevlm.bench.timing import spread, timed
from edgevlm.errors import UserError
from edgevlm.runtime import _native, kernels
from edgevlm.runtime.auto import AUTO
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.engine import KVBuffer, arrays_of
from edgevlm.runtime.policies import Appended, Guidance, Policy, StreamShape, create_policy, evicting
from edgevlm.runtime.policies.retrieval import Retrieval

FRAMES = 31  # held at the default shape: 31 frames of 14 x 14 tokens
GROUP = 8  # query heads of each KV head, where a policy asks for queries
GUIDANCE_ROWS = 16  # of each guidance text


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A cache's sizes: ``tokens`` held in each layer and KV head, all of them vision."""

    layers: int = 36
    kv_heads: int = 2
    head_dim: int = 128
    tokens: int = 6076

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.tokens) < 1 or self.head_dim < 2 or self.head_dim % 2:
            raise UserError("--layers, --kv-heads and --tokens are 1 or more, and --head-dim is even")

    @property
    def side(self) -> int:
        """Patches along a frame."""
        return max(1, round((self.tokens / FRAMES) ** 0.5))


class FilledCache:
    """A cache that is filled with noise up to its budget, again and again."""

    kind: Callable[..., KVCache] = KVCache

    def __init__(self, shape: CacheShape, dtype: str, seed: int = 0) -> None:
        pairs = shape.head_dim // 2
        inv_freq = 1 / 1e6 ** (np.arange(pairs) / pairs)
        self.shape, self.next = shape, 0
        capacity = shape.tokens + 1  # one for a summary
        heads, scales = (shape.layers, shape.kv_heads, shape.head_dim), None
        if dtype == "int8":
            scales = noise_scales(*heads)
        self.cache = self.kind(*heads, capacity, inv_freq=inv_freq, dtype=dtype, scales=scales)
        self._random = np.random.default_rng(seed)
        noise = self._random.standard_normal((shape.kv_heads, shape.tokens, shape.head_dim), np.float32)
        self._noise = as_stored(noise, self.cache.buffers()[0])

    def fill(self) -> Rows | None:
        """Append rows, the next of the stream, until the fullest layer is at the budget; None if it is."""
        count = self.shape.tokens - int(self.cache.lengths.max())
        if count <= 0:
            return None
        token, side = np.arange(self.next, self.next + count), self.shape.side
        patch = token % side**2
        rows = Rows(
            kind=np.full(count, Kind.VISION, np.uint8),
            seq=token.astype(np.int64),
            frame=(token // side**2).astype(np.int32),
            row=(patch // side).astype(np.int16),
            col=(patch % side).astype(np.int16),
            position=token[:, None].astype(np.int32),
        )
        self.cache.reserve(count)
        for buffer, held in zip(self.cache.buffers(), self.cache.lengths, strict=True):
            shifts = self._random.integers(self.shape.tokens, size=2)
            self.write(buffer, int(held), [np.roll(self._noise, int(shift), 1)[:, :count] for shift in shifts])
        self.cache.commit(rows)
        self.next += count
        return rows

    def write(self, buffer: KVBuffer, start: int, rows: Sequence[np.ndarray]) -> None:
        """Keys and values from row ``start`` on, each ``[kv_heads, n, head_dim]``."""
        for memory, new in zip(arrays_of(buffer), rows, strict=True):
            memory[:, start : start + new.shape[1]] = new

    def noise(self, heads: int, rows: int) -> np.ndarray:
        return self._random.standard_normal((heads, rows, self.shape.head_dim), np.float32)


def compression(
    policy: Sequence[str] = ("infinipot-v", "sliding-window", "last-seen"),
    layers: int = 36,
    kv_heads: int = 2,
    head_dim: int = 128,
    tokens: int = 6076,
    dtype: Sequence[str] = ("fp32",),
    threads: int = 1,
    rounds: int = 3,
    device: str = "cpu",
    *,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each policy (``all``: every one that evicts) and dtype of keys and values; milliseconds, medians of rounds.

    ``pass_over_read``: one compression over one plain read, round by round; ``reference_ms``: the same with numpy. With
    ``device="cuda"`` a line for each part of a compression, beside a copy within the device. Raises UserError for a policy that
    does not evict, and without a device.
    """
    shape = CacheShape(layers, kv_heads, head_dim, tokens)
    if device == "cuda":
        from edgevlm.bench.compression_cuda import measure as measure_parts

        for kind in dtype:
            progress(f"{kind}: {rounds} rounds")
            yield from measure_parts(shape, kind, rounds)
        return
    names = evicting() if list(policy) == ["all"] else policy
    for name in names:  # wrong names are refused before anything is measured
        if name == AUTO:
            raise UserError("--policy auto is chosen for a model, and compression is timed without one; name a policy")
        if isinstance(create_policy(name), Retrieval):
            raise UserError(f"policy {name} retrieves and does not compress; edgevlm bench memory retrieval times it")
    for name, kind in product(names, dtype):
        yield measure(name, shape, kind, threads, rounds, prefixed(progress, f"{name}, {kind}"))


def measure(
    text: str, shape: CacheShape, dtype: str, threads: int, rounds: int, progress: Progress = lambda what: None
) -> dict[str, Any]:
    """Time one policy, ``name`` or ``name:setting=value,...``, on a cache of ``shape``."""
    before = kernels.threads()
    kernels.set_threads(threads)
    try:
        cold, *times = _rounds(create_policy(text), shape, dtype, rounds, progress)
    finally:
        kernels.set_threads(before)
    passes, reads, others = zip(*times, strict=True)
    over = spread([one / read for one, read in zip(passes, reads, strict=True)], "pass_over_read", "pass_low", "pass_high", 2)
    took = spread(passes, "ms")
    return {
        "bench": "compression", "policy": text, "dtype": dtype, "threads": threads, **asdict(shape),
        "ms": took.pop("ms"), "read_ms": round(median(reads), 3), "pass_over_read": over.pop("pass_over_read"),
        "reference_ms": round(median(others), 3), **took, **over, "cold_ms": round(cold[0], 3),
    }  # fmt: skip


def _rounds(
    policy: Policy, shape: CacheShape, dtype: str, rounds: int, progress: Progress
) -> Iterator[tuple[float, float, float]]:
    """(pass, plain read, numpy) in milliseconds, of a first round that is not to be counted and of ``rounds`` more."""
    memory = FilledCache(shape, dtype)
    cache = memory.cache
    policy.attach(shape.tokens, StreamShape(shape.layers, shape.side**2, 0))
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}")
        appended = _queries(policy, memory, memory.fill())
        guidance = _guidance(policy, memory)
        twin = copy.deepcopy(policy)
        read = timed(lambda: _native.read(cache.native))
        slow = timed(partial(_with_numpy, twin, cache, appended, guidance))
        fast = timed(partial(_compress, policy, cache, appended, guidance))
        yield fast, read, slow


def _compress(policy: Policy, cache: KVCache, appended: Appended | None, guidance: Guidance) -> None:
    if appended is not None:
        policy.after_append(cache, appended)
    plan = policy.before_append(cache, policy.shape.tokens_per_frame, lambda: guidance)
    assert plan is not None, "the memory is full"
    cache.evict(plan.keep)
    for layer, new in plan.add.items():
        cache.append(layer, new.key, new.value, new.rows)


def _with_numpy(policy: Policy, cache: KVCache, appended: Appended | None, guidance: Guidance) -> None:
    """The same with numpy; what is left of keys and values goes to new arrays, and the cache stays as it is."""
    with numpy_kernels.in_place():
        if appended is not None:
            policy.after_append(cache, appended)
        plan = policy.before_append(cache, policy.shape.tokens_per_frame, lambda: guidance)
    assert plan is not None, "the memory is full"
    for layer, keep in enumerate(plan.keep):
        if keep is not None:
            numpy_kernels.evict([cache.key(layer), cache.value(layer)], keep)


def _queries(policy: Policy, memory: FilledCache, rows: Rows | None) -> Appended | None:
    if rows is None:
        return None
    heads = memory.shape.kv_heads * GROUP
    queries = {layer: memory.noise(heads, len(rows)) for layer in policy.needs.probe_layers}
    return Appended(rows.seq, rows.position, queries)


def _guidance(policy: Policy, memory: FilledCache) -> Guidance:
    rows = tuple(GUIDANCE_ROWS for _ in policy.needs.guidance or ())
    layers, kv_heads = policy.needs.guidance_layers, memory.shape.kv_heads
    queries: Mapping[int, np.ndarray] = {layer: memory.noise(kv_heads * GROUP, sum(rows)) for layer in layers}
    return Guidance(queries, {layer: memory.noise(kv_heads, sum(rows)) for layer in layers}, rows)

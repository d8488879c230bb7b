"""What a compression costs: each policy beside its numpy rendition and beside one plain read of the keys and values it holds.

A pass is everything a policy does from one compression to the next: its scores, its choice, and the eviction. Guidance
forwards are no part of it; their queries, and those of probed layers, are noise. All three are timed in turn, round by
round, on the same memory, which is filled up again in between. Medians are reported, with quartiles; the first round is cold
and apart.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from edgevlm.bench import numpy_kernels
from edgevlm.bench.noise import as_stored, noise_scales
from edgevlm.bench.rounds import quartiles
from edgevlm.bench.timing import timed
from edgevlm.errors import UserError
from edgevlm.runtime import _native, kernels, reference
from edgevlm.runtime.auto import AUTO
from edgevlm.runtime.cache import KVCache, Rows
from edgevlm.runtime.engine import KVBuffer, arrays_of
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.policies import Appended, Guidance, Policy, StreamShape, create_policy, evicting

FRAMES = 31  # held at the default shape: 31 frames of 14 x 14 tokens
GROUP = 8  # query heads of each KV head, where a policy asks for queries
GUIDANCE_ROWS = 16  # of each guidance text


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the cache: ``tokens`` held in each layer and KV head, all of them vision."""

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


@dataclass(frozen=True, slots=True)
class Result:
    """Times in milliseconds, medians over the rounds. spread, ratios: quartiles and median of passes, and over reads."""

    policy: str
    dtype: str
    threads: int
    shape: Shape
    ms: float
    read_ms: float
    reference_ms: float
    cold_ms: float
    spread: tuple[float, float, float]
    ratios: tuple[float, float, float]

    def line(self) -> dict[str, Any]:
        return {
            "bench": "compression",
            "policy": self.policy,
            "dtype": self.dtype,
            "threads": self.threads,
            "layers": self.shape.layers,
            "kv_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "tokens": self.shape.tokens,
            "ms": round(self.ms, 3),
            "read_ms": round(self.read_ms, 3),
            "pass_over_read": round(self.ratios[1], 2),
            "reference_ms": round(self.reference_ms, 3),
            "low": round(self.spread[0], 3),
            "high": round(self.spread[2], 3),
            "pass_low": round(self.ratios[0], 2),
            "pass_high": round(self.ratios[2], 2),
            "cold_ms": round(self.cold_ms, 3),
        }


class Memory:
    """A cache that is filled with noise up to its budget, again and again."""

    kind: Callable[..., KVCache] = KVCache

    def __init__(self, shape: Shape, dtype: str, seed: int = 0) -> None:
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


def measure(text: str, shape: Shape, dtype: str, threads: int, rounds: int) -> Result:
    """Time one policy, ``name`` or ``name:setting=value,...``, on a memory of ``shape``."""
    before = kernels.threads()
    kernels.set_threads(threads)
    try:
        cold, *times = _rounds(create_policy(text), shape, dtype, rounds)
    finally:
        kernels.set_threads(before)
    passes, reads, others = zip(*times, strict=True)
    ratios = [one / read for one, read in zip(passes, reads, strict=True)]
    medians = (statistics.median(passes), statistics.median(reads), statistics.median(others))
    return Result(text, dtype, threads, shape, *medians, cold[0], quartiles(passes), quartiles(ratios))


def _rounds(policy: Policy, shape: Shape, dtype: str, rounds: int) -> Iterator[tuple[float, float, float]]:
    """(pass, plain read, rendition) in milliseconds, of a first round that is not to be counted and of ``rounds`` more."""
    memory = Memory(shape, dtype)
    cache = memory.cache
    policy.attach(shape.tokens, StreamShape(shape.layers, shape.side**2, 0))
    for _ in range(rounds + 1):
        appended = _queries(policy, memory, memory.fill())
        guidance = _guidance(policy, memory)
        twin = copy.deepcopy(policy)
        read = timed(lambda: _native.read(cache.native))
        slow = timed(partial(_rendition, twin, cache, appended, guidance))
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


def _rendition(policy: Policy, cache: KVCache, appended: Appended | None, guidance: Guidance) -> None:
    """The same with numpy; what is left of keys and values goes to new arrays, and the cache stays as it is."""
    with numpy_kernels.in_place():
        if appended is not None:
            policy.after_append(cache, appended)
        plan = policy.before_append(cache, policy.shape.tokens_per_frame, lambda: guidance)
    assert plan is not None, "the memory is full"
    for layer, keep in enumerate(plan.keep):
        if keep is not None:
            reference.evict([cache.key(layer), cache.value(layer)], keep)


def _queries(policy: Policy, memory: Memory, rows: Rows | None) -> Appended | None:
    if rows is None:
        return None
    heads = memory.shape.kv_heads * GROUP
    queries = {layer: memory.noise(heads, len(rows)) for layer in policy.needs.probe_layers}
    return Appended(rows.seq, rows.position, queries)


def _guidance(policy: Policy, memory: Memory) -> Guidance:
    rows = tuple(GUIDANCE_ROWS for _ in policy.needs.guidance or ())
    layers, kv_heads = policy.needs.guidance_layers, memory.shape.kv_heads
    queries: Mapping[int, np.ndarray] = {layer: memory.noise(kv_heads * GROUP, sum(rows)) for layer in layers}
    return Guidance(queries, {layer: memory.noise(kv_heads, sum(rows)) for layer in layers}, rows)


def run(policies: Sequence[str], shape: Shape, dtypes: Sequence[str], threads: int, rounds: int) -> Iterator[Result]:
    """A result for each policy (all that evict if none is named) and dtype, as it comes."""
    names = policies or evicting()
    for name in names:
        if name == AUTO:
            raise UserError("--policy auto is chosen for a model, and compression is timed without one; name a policy")
        if create_policy(name).retrieves:  # wrong names are refused before anything is measured
            raise UserError(f"policy {name} retrieves and does not compress; edgevlm bench retrieval times it")
    for name in names:
        for dtype in dtypes:
            yield measure(name, shape, dtype, threads, rounds)

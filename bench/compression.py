"""Time how long each policy takes to choose and evict tokens, compared with reading the same keys and values once.

The time covers everything a policy does from one compression to the next: scoring, choosing and evicting. Forward passes are
not timed, and queries are random. Compression and reading take turns on the same cache, which is refilled between rounds. The
first round is reported separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from edgevlm.bench.noise import GROUP, CacheShape, FilledCache
from edgevlm.bench.timing import spread, timed
from edgevlm.errors import UserError
from edgevlm.progress import show
from edgevlm.runtime import _native, kernels
from edgevlm.runtime.cache import KVCache, Rows
from edgevlm.runtime.kv import KV_TYPES
from edgevlm.runtime.policies import Appended, Guidance, Policy, StreamShape, as_policy, create_policy, evicting, layers_of
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.settings import AUTO

GUIDANCE_ROWS = 16  # rows of each guidance text


def compression(
    policy: Sequence[str] = ("infinipot-v", "sliding-window", "last-seen"),
    layers: int = 36,
    tokens: int = 6076,
    dtype: Sequence[str] = ("fp32",),
    threads: int = 1,
    rounds: int = 3,
    device: str = "cpu",
) -> Iterator[dict[str, Any]]:
    """Yield a line for each policy and KV dtype, with medians over rounds in milliseconds.

    ``policy``, ``dtype``: ``all`` selects every policy or dtype. ``pass_over_read``: the time of a compression divided by that
    of a plain read, in the same round. With ``device="cuda"``, each line is about one part of a compression, compared with a
    copy within the device's memory. Raises UserError for a policy that does not evict, an invalid dtype, or an invalid or
    absent device.
    """
    shape, kinds = CacheShape(layers=layers, tokens=tokens), KV_TYPES if list(dtype) == ["all"] else dtype
    for name, typed, known in (("dtype", kinds, KV_TYPES), ("device", [device], ("cpu", "cuda"))):
        if unknown := [one for one in typed if one not in known]:
            raise UserError(f"--{name} {unknown[0]}: choose from {', '.join(known)}")
    if device == "cuda":
        from edgevlm.bench.compression_cuda import measure as measure_parts

        for kind in kinds:
            show(f"{kind}: {rounds} rounds")
            yield from measure_parts(shape, kind, rounds)
        return
    names = evicting() if list(policy) == ["all"] else policy
    for name in names:  # check all names before measuring anything
        if name == AUTO or isinstance(create_policy(name), Retrieval):
            raise UserError(f"--policy {name}: does not compress by itself; choose an eviction policy")
    for name, kind in product(names, kinds):
        yield measure(name, shape, kind, threads, rounds)


def measure(text: str | Policy, shape: CacheShape, dtype: str, threads: int, rounds: int) -> dict[str, Any]:
    """Time one policy on a cache of random keys and values. ``text``: ``name`` or ``name:setting=value,...``."""
    policy, memory, before, times = as_policy(text), FilledCache(shape, dtype), kernels.threads(), list[Any]()
    policy.attach(shape.tokens, StreamShape(shape.layers, shape.side**2, 0))
    kernels.set_threads(threads)
    try:
        for number in range(rounds + 1):
            show(f"{text}, {dtype}: round {number} of {rounds}")
            appended = _queries(policy, memory, memory.fill())
            guidance = _guidance(policy, memory)
            read = timed(partial(_native.read, memory.cache))
            times.append((timed(partial(_compress, policy, memory.cache, appended, guidance)), read))
    finally:
        kernels.set_threads(before)
    passes, reads = zip(*times[1:], strict=True)
    over = spread((one / read for one, read in times[1:]), "pass_over_read", "pass_low", "pass_high", 2)
    took = spread(passes, "ms")
    return {
        "bench": "compression", "policy": str(text), "dtype": dtype, "threads": threads, **asdict(shape),
        "ms": took.pop("ms"), "read_ms": round(median(reads), 3), "pass_over_read": over.pop("pass_over_read"),
        **took, **over, "cold_ms": round(times[0][0], 3),
    }  # fmt: skip


def _compress(policy: Policy, cache: KVCache, appended: Appended | None, guidance: Guidance) -> None:
    if appended is not None:
        policy.after_append(layers_of(cache), appended)
    plan = policy.before_append(cache, policy.shape.tokens_per_frame, lambda: guidance)
    assert plan is not None, "the memory is full"
    plan.carry_out(cache)


def _queries(policy: Policy, memory: FilledCache, rows: Rows | None) -> Appended | None:
    if rows is None:
        return None
    heads = memory.shape.kv_heads * GROUP
    return Appended(rows.seq, rows.position, {layer: memory.noise(heads, len(rows)) for layer in policy.needs.probe_layers})


def _guidance(policy: Policy, memory: FilledCache) -> Guidance:
    rows = tuple(GUIDANCE_ROWS for _ in policy.needs.guidance or ())
    layers, heads = policy.needs.guidance_layers, memory.shape.kv_heads
    queries, keys = ({layer: memory.noise(count, sum(rows)) for layer in layers} for count in (heads * GROUP, heads))
    return Guidance(queries, keys, rows)

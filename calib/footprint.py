"""Equal bytes: what a policy takes in all, and the budget at which that is no more than a plain window takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.policies import Policy, StreamShape
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.retrieval.stats import RetrievalStats
from edgevlm.runtime.retrieval.working import WorkingSet
from edgevlm.runtime.store import Store

SCRATCH = {
    "InfiniPotV": {"_kept", "_scored"},
    "Hermes": {"_scores"},
    "LastSeen": {"_scored", "_kept"},
    "CrossLayer": {"_mass"},
    "Oracle": {"priority"},
}
"""Attributes that are no state: each compression or call fills them before it reads them, or they are what an oracle knows."""

ELSEWHERE = (StreamShape, KVCache, WorkingSet, RetrievalStats, Store)
"""What a policy may hold that is not its own: what is known of the model; the arena, counted already; what lies
below it; what is counted for people."""

OF_CALLS = {"_tables"}
"""Attributes of any retrieval policy that each call fills."""


class Footprint:
    """The most bytes that cache and policy took together, of the moments measured."""

    def __init__(self) -> None:
        self.peak = 0

    def measure(self, cache: KVCache, policy: Policy) -> None:
        self.peak = max(self.peak, cache.nbytes + state_bytes(policy))


def state_bytes(policy: Policy) -> int:
    """Bytes of the arrays that a policy holds beside the cache between calls, each counted once, scratch left out.

    They are looked for, not declared: a policy that nobody has told of this is charged for everything it holds.
    """
    return sum(array.nbytes for array in _arrays(policy, set()))


def _arrays(thing: object, seen: set[int]) -> Iterator[np.ndarray]:
    if id(thing) in seen or isinstance(thing, ELSEWHERE):
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        yield thing
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from _arrays(part, seen)
    elif isinstance(thing, list | tuple | set):
        for part in thing:
            yield from _arrays(part, seen)
    elif type(thing).__module__.startswith("edgevlm."):
        scratch = SCRATCH.get(type(thing).__name__, set()) | (OF_CALLS if isinstance(thing, Retrieval) else set())
        for name in (*getattr(thing, "__dict__", ()), *getattr(thing, "__slots__", ())):
            if name not in scratch:
                yield from _arrays(getattr(thing, name, None), seen)


def bytes_per_token(bundle: Bundle) -> int:
    """What one more token in every layer adds to a cache, alignment evened out."""
    spec = bundle.decoder
    shape, inv_freq = (spec.layers, spec.kv_heads, spec.head_dim), np.array(spec.inv_freq)
    few, many = (KVCache.bytes_for(*shape, rows, inv_freq=inv_freq, dtype=spec.kv) for rows in (1024, 2048))
    return (many - few) // 1024


def fitted(tokens: int, allowed: int, per_token: int, least: int, taken: Callable[[int], int]) -> int:
    """The largest budget, ``tokens`` at most, at which a policy takes no more than ``allowed`` bytes.

    per_token: bytes of one more token in every layer; least: tokens of a frame; taken: measures the bytes at a budget, by which
    they rise. Raises UserError when less than a frame is left.
    """
    low, over = tokens, taken(tokens) - allowed
    high, beyond = tokens + 1, max(over, 1)
    while over > 0:
        high, beyond = low, over
        low -= -(-over // per_token)
        if low < least:
            left = f"at equal bytes {max(low, 0)} tokens are left to it"
            raise UserError(f"{left}, less than one frame, which takes {least}")
        over = taken(low) - allowed
    while high - low > 1:
        middle = low + (high - low) * -over // (beyond - over)  # where a line between the two would meet what is allowed
        middle = min(max(middle, low + 1), high - 1)
        excess = taken(middle) - allowed
        if excess > 0:
            high, beyond = middle, excess
        else:
            low, over = middle, excess
    return low

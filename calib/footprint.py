"""Equal bytes: what a policy takes in all, and the budget at which that is no more than a plain window takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.policies import Policy


class Footprint:
    """The most bytes that cache and policy (its ``state_fields``) took together, of the moments measured."""

    def __init__(self) -> None:
        self.peak = 0

    def measure(self, cache: KVCache, policy: Policy) -> None:
        self.peak = max(self.peak, cache.nbytes + policy.state_bytes)


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

"""Statistics of a stream and a session."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgevlm.runtime.store import StoreUse


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counters since the stream opened; times in milliseconds. An immutable value.

    - compressions: calls of the policy that evicted rows.
    - compress_ms: the policy's own time and the eviction, without guidance.
    - guidance_ms: forward passes of the policy's guidance texts.
    - evicted: rows evicted, summed over layers and KV heads.
    - reindexings, reindex_ms: re-indexings of positions, and their time.
    - prefill_ms: forward passes that append frames.
    - tokens_seen, tokens_appended: tokens of the frames watched, and of them appended; 0 where whole frames are appended.
    """

    compressions: int = 0
    compress_ms: float = 0.0
    guidance_ms: float = 0.0
    evicted: int = 0
    reindexings: int = 0
    reindex_ms: float = 0.0
    prefill_ms: float = 0.0
    tokens_seen: int = 0
    tokens_appended: int = 0

    @property
    def appended(self) -> float:
        """Fraction of the frames' tokens that entered the memory."""
        return self.tokens_appended / self.tokens_seen if self.tokens_seen else 1.0

    def plus(self, **more: float) -> MemoryStats:
        """Return a copy with ``more`` added to the named counters."""
        return replace(self, **{name: getattr(self, name) + number for name, number in more.items()})


@dataclass(frozen=True, slots=True)
class SessionStats:
    """A session's statistics after its last call: an immutable value.

    frames watched, and fps since the first of them; tokens of memory held in the fullest layer; cache_bytes allocated once at
    start, policy_bytes that the policy now keeps beside them, present_bytes of the newest frame and the change references;
    encoded, the fraction of the frames' patches that was encoded, and tower_bytes kept for that; ttft_ms (from ask to the first
    token) and tpot_ms (each further one) of the newest answer; state_bytes of the buffer that snapshots are taken in, snapshots
    written by this process, and held_ms, the longest that the stream waited for one; store: rows offloaded by a retrieval
    policy.
    """

    frames: int
    chunks: int
    fps: float
    tokens: int
    cache_bytes: int
    policy_bytes: int
    encode_ms: float
    ttft_ms: float
    tpot_ms: float
    memory: MemoryStats
    present_bytes: int = 0
    encoded: float = 1.0
    tower_bytes: int = 0
    state_bytes: int = 0
    snapshots: int = 0
    held_ms: float = 0.0
    store: StoreUse | None = None

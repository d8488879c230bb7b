"""What a stream and a session have done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MemoryStats:
    """Counted since the stream opened; times in milliseconds."""

    compressions: int = 0
    compress_ms: float = 0.0  # the policy's own time and the eviction; guidance forwards are apart
    guidance_ms: float = 0.0
    evicted: int = 0
    reindexings: int = 0
    reindex_ms: float = 0.0
    prefill_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionStats:
    """What a session has done so far.

    frames watched, and fps since the first of them; tokens of memory held in the fullest layer; cache_bytes allocated once at
    start, policy_bytes that the policy now keeps beside them; ttft_ms (from ask to the first token) and tpot_ms (each further
    one) of the newest answer; state_bytes of the buffer that snapshots are taken in, snapshots written by this process, and
    held_ms, the longest that the stream waited for one.
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
    state_bytes: int = 0
    snapshots: int = 0
    held_ms: float = 0.0

"""Statistics of a stream and a session."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgevlm.runtime.store import StoreUse


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Immutable counters since the stream was opened, with times in milliseconds.

    ``compressions``: how many policy calls evicted rows. ``compress_ms``: the time spent in the policy and on evictions,
    excluding guidance. ``guidance_ms``: the time in forward passes of the policy's guidance texts. ``evicted``: the evicted
    rows of all layers and KV heads. ``reindexings``, ``reindex_ms``: how often positions were re-indexed, and the time this
    took. ``prefill_ms``: the time in forward passes that append frames. ``tokens_seen``, ``tokens_appended``: the tokens of the
    watched frames, and how many of them were appended; both 0 if frames are appended whole.
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
        """The fraction of the frames' tokens that entered the memory."""
        return self.tokens_appended / self.tokens_seen if self.tokens_seen else 1.0

    def plus(self, **more: float) -> MemoryStats:
        """Return a copy with these numbers added to the counters of the same names."""
        return replace(self, **{name: getattr(self, name) + number for name, number in more.items()})


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Immutable statistics of a session, as of its last call.

    ``frames`` is the number of frames watched, and ``fps`` the number watched per second. ``tokens`` is the number of rows in
    the fullest layer. ``cache_bytes`` is the cache's size, allocated once at the start; ``policy_bytes`` is the current size of
    the policy's state. ``present_bytes`` is the size of the frames outside the memory and of the references that frames are
    compared with. ``encoded`` is the fraction of the frames' patches that was encoded, and ``tower_bytes`` the size of the
    encoder's state. ``ttft_ms`` is the newest answer's time to its first token, and ``tpot_ms`` its mean time per token after
    the first. Snapshots are copied to a buffer of ``state_bytes`` bytes. ``snapshots`` is the number of snapshots that this
    process wrote, and ``held_ms`` the longest time that one of them stopped the stream. ``store`` describes the rows that a
    retrieval policy offloaded.
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

"""The stream's position counter and the rule that says when kept positions are made dense again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache

Reindexing = Literal["lazy", "eager", "never"]


def rope_tables(positions: NDArray[np.int32], inv_freq: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, each float32 ``[S, head_dim / 2]``, of positions ``[S]``; angles in float32, as transformers has them."""
    angles = positions.astype(np.float32)[:, None] * inv_freq
    return np.cos(angles), np.sin(angles)


@dataclass(slots=True)
class Positions:
    """1-D rotary positions of one stream: each row takes the next index.

    limit: the smaller of the model's limit and the trained length written in the bundle. margin: min(1024, limit / 4), and
    never less than the text room, so that a question always fits below the limit. (InfiniPot-V App. B.4, HERMES App. F.)
    """

    limit: int
    text_room: int
    reindexing: Reindexing = "lazy"
    next: int = 0

    @property
    def margin(self) -> int:
        return max(min(1024, self.limit // 4), self.text_room)

    def due(self, rows: int, compressed: bool) -> bool:
        """Whether to make positions dense before ``rows`` more are appended."""
        if self.reindexing == "never":
            return False
        return (compressed and self.reindexing == "eager") or self.next + rows > self.limit - self.margin

    def compact(self, cache: KVCache, prefix: int) -> None:
        """Replace kept positions by their dense rank per layer and head, and go on from the largest."""
        self.next = cache.reindex(prefix)

    def take(self, rows: int) -> NDArray[np.int32]:
        """The positions of the next ``rows`` rows."""
        positions = np.arange(self.next, self.next + rows, dtype=np.int32)
        self.next += rows
        return positions

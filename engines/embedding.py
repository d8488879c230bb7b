"""Token embeddings, gathered row by row from the mapped file that the bundle keeps them in."""

from __future__ import annotations

import numpy as np

from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Float32, Int64

HALF = 128  # the code that stands for 0


class Embedding:
    """A bundle's embedding in float32, float16, or codes of 8 bits with a scale for each block of a row."""

    def __init__(self, bundle: Bundle) -> None:
        spec = bundle.decoder
        self._hidden = spec.hidden
        self._table = np.load(bundle.file(spec.embedding), mmap_mode="r", allow_pickle=False)
        self._scales = None
        if spec.embedding_scales is not None:
            self._scales = np.load(bundle.file(spec.embedding_scales), mmap_mode="r", allow_pickle=False)

    def rows(self, ids: Int64) -> Float32:
        """``[N]`` to ``[N, hidden]``; raises ValueError for ids outside the vocabulary."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._table):
            raise ValueError(f"token ids must lie in [0, {len(self._table)}), not {ids.min()} to {ids.max()}")
        found = np.asarray(self._table[ids], np.float32)
        if self._scales is None:
            return found
        blocks = (found - HALF) * self._scales[ids][..., None]
        return blocks.reshape(len(ids), -1)[:, : self._hidden]

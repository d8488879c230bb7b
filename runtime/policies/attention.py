"""Attention mass from probed queries: what the attention-scored policies rank tokens by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime import primitives


def attention_mass(
    query: NDArray[np.float32],
    query_seq: NDArray[np.int64],
    key: NDArray[np.floating],
    seq: NDArray[np.int64],
    own_key: NDArray[np.float32] | None = None,
    own_seq: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """:func:`edgevlm.runtime.primitives.attention_mass`."""
    return primitives.attention_mass(query, query_seq, key, seq, own_key, own_seq)

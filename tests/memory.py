"""A stream's memory as bytes, to see that nothing changed it."""

import numpy as np


def arena(stream):
    """Every valid row of the memory, byte for byte, and where the stream goes on."""
    cache = stream.cache
    parts = [
        of(layer)
        for layer in range(cache.layers)
        for of in (cache.key, cache.value, cache.kind, cache.seq, cache.frame, cache.row, cache.col, cache.position)
    ]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts), stream.positions.mark(), stream._seq

"""A stream's memory as bytes, to see that nothing changed it."""

import numpy as np


def arena(stream):
    """Every valid row of the memory, byte for byte, and where the stream goes on."""
    cache = stream.cache
    parts = [part for layer in range(cache.layers) for part in cache.held(layer).values()]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts), stream.positions.mark(), stream._seq

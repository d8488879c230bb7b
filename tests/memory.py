"""A stream's memory as bytes, to see that nothing changed it."""

import numpy as np


def arena(stream):
    """Every valid row of the memory, byte for byte, and where the stream continues."""
    cache = stream.cache
    parts = [part for layer in range(cache.layers) for part in cache.held(layer).values()]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts), stream.positions.mark(), stream._seq


def rows_of(stream):
    """The rows of each layer and head in the order of the stream: what is known of them, and keys and values."""
    cache, known, content = stream.cache, [], []
    for layer in range(cache.layers):
        order = np.argsort(cache.seq(layer), 1)
        for of in (cache.kind, cache.seq, cache.frame, cache.row, cache.col, cache.confirmed):
            known.append(np.take_along_axis(of(layer), order, 1))
        for of in (cache.position, cache.key, cache.value):
            content.append(np.take_along_axis(of(layer), order[..., None], 1))
    return known, content

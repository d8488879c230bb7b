"""Merge what leaves into what stays: `edgevlm run --policy ./examples/merging_policy.py:Merge`."""

from dataclasses import dataclass

import numpy as np

from edgevlm.extend import Layer, Policy, setting


@dataclass
class Merge(Policy):
    """Evict tokens at even distances in the stream; the kept token with the most similar key takes each in."""

    weight: float = setting(0.2, "of a token that leaves, beside 1 of the token that takes it in", above=0, at_most=1)

    def compress(self, layer: Layer) -> None:
        rank = layer.seq.argsort(1).argsort(1).astype(float)  # of each row, by its place in the stream
        keep = layer.top((rank * layer.target / len(rank[0])) % 1, layer.target)
        gone, into = layer.free & ~keep, np.zeros(keep.shape, int)
        keys = layer.keys / (np.linalg.norm(layer.keys, axis=-1, keepdims=True) + 1e-9)
        for head, (leaves, stays) in enumerate(zip(gone, keep, strict=True)):
            if stays.any():
                into[head, leaves] = np.flatnonzero(stays)[(keys[head, leaves] @ keys[head, stays].T).argmax(1)]
        if layer.target:
            layer.merge(gone, into, np.where(gone, self.weight, 1.0))
        else:
            layer.keep(keep)

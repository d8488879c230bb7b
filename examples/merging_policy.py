"""Merge evicted tokens into kept ones: `edgevlm run --policy ./examples/merging_policy.py:Merge`."""

from dataclasses import dataclass

import numpy as np

from edgevlm.extend import Layer, Policy, setting


@dataclass
class Merge(Policy):
    """A policy that evicts tokens evenly along the stream and merges each into the kept token with the most similar key."""

    weight: float = setting(0.2, "weight of an evicted token; the token it is merged into has weight 1", above=0, at_most=1)

    def compress(self, layer: Layer) -> None:
        rank = layer.seq.argsort(1).argsort(1).astype(float)  # each row's place in the stream
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

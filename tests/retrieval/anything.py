"""A retrieval policy whose choice is drawn: other blocks for every layer, KV head and call."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgevlm.runtime.policies.retrieval import Retrieval, block_of
from edgevlm.runtime.stateful import strip_prefix


@dataclass
class Anything(Retrieval):
    """Blocks are frames of one head. Up to ``share`` of them are chosen, at random; with 1 all, oldest first."""

    share: float = 0.5
    name: ClassVar[str] = "anything"
    paper: ClassVar[str] = "for tests"

    def open(self, cache, store):
        super().open(cache, store)
        self.random = np.random.default_rng(5)
        self.blocks = [[[] for _ in range(cache.kv_heads)] for _ in range(cache.layers)]

    def offload(self, cache, layer, leaving):
        for head in range(cache.kv_heads):
            for frame in np.unique(cache.frame(layer)[head][leaving[head]]):
                rows = np.flatnonzero(leaving[head] & (cache.frame(layer)[head] == frame))
                block = block_of(cache, layer, np.stack([rows] * cache.kv_heads)).head(head)
                self.blocks[layer][head].append(self.store.put(block))

    def choose(self, layer, query, phase):
        if self.share == 1:
            return self.blocks[layer]
        counts = [self.random.integers(0, int(np.ceil(self.share * len(of))) + 1) for of in self.blocks[layer]]
        return [self.random.permutation(of)[:count] for of, count in zip(self.blocks[layer], counts, strict=True)]

    def forget_lost(self):
        """It does not ask what is lost."""

    def state(self):
        layers, heads = range(len(self.blocks)), range(len(self.blocks[0]))
        blocks = {f"blocks.{layer}.{head}": np.array(self.blocks[layer][head]) for layer in layers for head in heads}
        return {**super().state(), **blocks}

    def restore(self, state):
        blocks = strip_prefix("blocks", state)
        super().restore({name: array for name, array in state.items() if not name.startswith("blocks.")})
        for name, of in blocks.items():
            layer, head = map(int, name.split("."))
            self.blocks[layer][head] = of.tolist()

"""What the authors' program does with a stream, on the readable decoder, in float64: append a chunk, then compress.

All heads of a layer hold the same rows, in the order of their positions. The memory is ``decoder.cache[layer][head]``.
"""

import numpy as np
from policies.reference_hermes import attention, best, min_max, recency, smoothed

GLOBAL = "Summarize the video narrative, identifying main characters, key events, timeline changes, and the overall theme."
LOCAL = "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and spatial relationships."
LAMBDAS = (0.1, 0.3, 0.4)


class Program:
    """``decoder``: a ReferenceDecoder; ``encode``: text to token ids. ``summary``: whether deep layers have one."""

    def __init__(self, decoder, encode, prefix_ids, budget, summary=True):
        self.decoder, self.encode, self.budget, self.summary = decoder, encode, budget, summary
        self.prefix, self.next, self.last_turn, self.compressions = len(prefix_ids), 0, None, 0
        self.append(decoder.embed(prefix_ids))
        layers = decoder.layers
        self.classes = [(layer >= int(0.1 * layers)) + (layer >= int(0.7 * layers)) for layer in range(layers)]

    def append(self, embeds):
        self.decoder.append(embeds, np.arange(self.next, self.next + len(embeds)))
        self.next += len(embeds)

    def chunk(self, embeds):
        self.append(embeds)
        if len(self.decoder.cache[0][0]) - self.prefix > self.budget:
            self.compress()

    def prompts(self):
        """Of the shallow, the middle and the deep layers."""
        local, overall = LOCAL, GLOBAL
        if self.last_turn:
            turn = "Question: {} Answer: {}".format(*self.last_turn)
            local, overall = f"Find recent details related to: {turn}. {LOCAL}", f"Context summary: {turn}. {GLOBAL}"
        return local, local + "; " + overall, overall

    def project(self, layer, text):
        """Rotated queries and keys of the text's raw embeddings, at positions after the memory."""
        decoder, embeds = self.decoder, self.decoder.embed(self.encode(text))
        normed, at = decoder._norm(embeds, f"layers.{layer}.input_layernorm"), self.next + np.arange(len(embeds))
        return [np.array([decoder._rotate(head, at) for head in decoder._heads(layer, part, normed)]) for part in "qk"]

    def tokens(self, layer):
        heads = self.decoder.cache[layer]
        keys = np.array([self.decoder._rotate(head.keys, head.positions) for head in heads])
        return [{"seq": i, "position": i, "key": keys[:, i]} for i in range(len(heads[0]))]

    def raw_scores(self, layer):
        """Of the layer's vision tokens; their ``seq`` is their place in the cache."""
        everything = self.tokens(layer)
        vision, depth = everything[self.prefix :], self.classes[layer]
        middle, deep = self.classes.index(1), self.classes.index(2)
        x = (layer - middle) / (deep - middle)
        alpha, k = ((1.0, 20.0), (1.0 - 0.9 * x, 20 - 19.5 * x), (0.0, 0.0))[depth]
        attended = attention(*self.project(layer, self.prompts()[depth]), everything, vision, causal=False)
        pairs = zip(min_max(attended, 1e-6), min_max(recency(vision, k), 1e-6), strict=True)
        return vision, [(1 - alpha) * a + alpha * r for a, r in pairs]

    def compress(self):
        self.compressions += 1
        layers = range(self.decoder.layers)
        found = smoothed([self.raw_scores(layer) for layer in layers], [LAMBDAS[c] for c in self.classes], by_rank=True)
        for layer in layers:
            summarised = self.summary and self.classes[layer] == 2
            chosen = sorted(best(*found[layer], self.budget - summarised))
            for head in self.decoder.cache[layer]:
                gone = np.setdiff1d(np.arange(self.prefix, len(head)), chosen)
                key, value = head.keys[gone].mean(0), head.values[gone].mean(0)
                head.keep([*range(self.prefix), *chosen])
                if summarised:
                    head.append(key[None], value[None], [0], [-1])
                head.positions = np.arange(len(head))
        self.next = max(len(heads[0]) for heads in self.decoder.cache)

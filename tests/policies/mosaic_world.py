"""A stream of scenes under mosaic, and under its reference, which is told of the same frames and rows."""

from dataclasses import replace

import numpy as np
from policies.filled import GROUP, HEADS, PREFIX, Filled, turned
from policies.reference_mosaic import EARLY_ROWS, FLOOR, Head, Visual, early_variance
from stored import PlainStore

from edgevlm.runtime.policies import StreamShape, create_policy, layers_of

GRID, LAYERS, BUDGET, WIDTH = (2, 2), 2, 160, 6
PER_FRAME = GRID[0] * GRID[1]


class Offloading(PlainStore):
    """A store that says of all blocks, or none, that they are in host memory."""

    def __init__(self, resident=True):
        super().__init__()
        self.all_resident = resident

    def resident(self, number):
        return self.all_resident and super().resident(number)


class World:
    """``settings`` as typed behind ``mosaic:``; ``cuts``: frames at which another scene begins."""

    def __init__(self, settings="", resident=True, dtype="fp32", axes=1, budget=BUDGET, seed=0):
        self.random = np.random.default_rng(seed)
        self.policy = create_policy(f"mosaic:{settings}")
        self.policy.attach(budget, StreamShape(LAYERS, PER_FRAME, PREFIX))
        capacity = budget + self.policy.working_rows + 40
        self.filled = Filled(LAYERS, capacity, GRID, np.random.default_rng(seed + 1), dtype, axes)
        self.filled.noise = 0.5
        self.cache, self.store = self.filled.cache, Offloading(resident)
        self.policy.open(self.cache, self.store)
        self.scenes = [(self.filled.base, self.random.normal(size=WIDTH))]
        for _ in range(3):
            self.scenes.append((self.random.normal(size=self.filled.base.shape), self.random.normal(size=WIDTH)))
        self.scene = 0
        self.reference = self.make_reference()

    def make_reference(self):
        policy = self.policy
        self.early, self.visual = [[[] for _ in range(HEADS)] for _ in range(LAYERS)], None
        self.known_limits = {}
        resident = self.store.all_resident
        return [
            [Head(policy.clusters.slots, lambda layer=layer: self.limits(layer), resident) for _ in range(HEADS)]
            for layer in range(LAYERS)
        ]

    def limits(self, layer):
        """Of the first rows of all heads, once they are there."""
        rows = self.early[layer]
        if len(rows[0]) < EARLY_ROWS:
            return None
        if layer not in self.known_limits:
            variance = np.mean([early_variance(of[:EARLY_ROWS]) for of in rows])
            self.known_limits[layer] = [max(FLOOR, times * variance) for times in (self.policy.tight, self.policy.loose)]
        return self.known_limits[layer]

    def play(self, frames, piece=2, cut_every=12):
        """Append so many frames, piece by piece; the scene changes now and then, and comes back."""
        for _ in range(0, frames, piece):
            if self.filled.frames and self.filled.frames % cut_every < piece:
                self.scene = int(self.random.integers(len(self.scenes)))
            self.filled.base, feature = self.scenes[self.scene]
            self.make_room(piece * PER_FRAME)
            first = self.filled.frames
            news = self.filled.frame(count=piece)
            frame = np.repeat(np.arange(first, first + piece), PER_FRAME).astype(np.int32)
            features = (feature + 0.2 * self.random.normal(size=(piece, WIDTH))).astype(np.float32)
            self.policy.after_append(layers_of(self.cache), replace(news, queries={}, frame=frame, features=features))
            self.watch(first, features)

    def make_room(self, rows):
        plan = self.policy.before_append(self.cache, rows, None)
        if plan is None:
            return
        for layer, keep in enumerate(plan.keep):
            leaving = [self.leaving(layer, head, keep[head]) for head in range(HEADS)]
            for head, tokens in enumerate(leaving):
                self.early[layer][head] += [token["bare"] for token in tokens]
            for head, tokens in enumerate(leaving):
                for token in tokens:
                    self.reference[layer][head].take(token, self.visual.of[token["frame"]] if self.visual else 0)
        self.cache.evict(plan.keep)

    def leaving(self, layer, head, keep):
        """Tokens that leave, oldest first, with their keys un-rotated in float64."""
        tokens = [token for token, stays in zip(self.tokens(layer, head), keep[PREFIX:], strict=True) if not stays]
        for token in tokens:
            token["bare"] = turned(token["key"].astype(np.float64), -np.asarray(token["position"]))
            token["value"] = token["value"].astype(np.float64)
        return sorted(tokens, key=lambda token: token["seq"])

    def tokens(self, layer, head):
        """In the order of the rows behind the prefix, which stays where it is."""
        assert (self.cache.seq(layer)[head, :PREFIX] < PREFIX).all()
        return self.filled.heads(layer)[head]

    def watch(self, first, features):
        if self.policy.visual is None:
            return
        if self.visual is None:
            self.visual = Visual(self.policy.visual.slots, self.policy.tight, self.policy.loose)
        for number, feature in enumerate(features.astype(np.float64)):
            if merged := self.visual.take(first + number, feature):
                for heads in self.reference:
                    for head in heads:
                        head.relabel(*merged)

    def clusters(self, layer, head):
        """By the seqs of their rows below: slot of each."""
        clusters = self.policy.clusters
        live = clusters.live(layer, head).tolist()
        return {self.seqs(clusters.pages.block_ids(layer, head, [slot])): slot for slot in live}

    def seqs(self, numbers):
        """Of the rows of these blocks, rising."""
        return tuple(sorted(seq for block in self.store.get(numbers) for seq in block.seq[0].tolist()))

    def query(self, rows=3):
        """Un-rotated queries ``[heads, rows, D]`` of every layer, and the call begun at some positions."""
        bare = self.random.normal(size=(LAYERS, HEADS * GROUP, rows, self.cache.head_dim)).astype(np.float32)
        angles = self.random.uniform(0, 6, (rows, self.cache.head_dim // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = np.split(bare, 2, -1)
        self.policy.begin(cos, sin)
        return bare, np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def of_group(self, bare, layer, head):
        """Rows of a KV head's query heads, float64."""
        return bare[layer, head * GROUP : (head + 1) * GROUP].reshape(-1, bare.shape[-1]).astype(np.float64)

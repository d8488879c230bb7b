"""Sparse prefill against the readable decoder with a mask, after other rows have left every layer and head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_decoder import ReferenceDecoder
from runner import Runner, WholeGraph

from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.runtime.engine import FramePattern

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llava_onevision", {"layers": 5, "heads": 6, "kv_heads": 2, "side": 5}),
    ("llava_onevision", {"layers": 4, "heads": 7, "kv_heads": 1, "head_dim": 16, "tied": True, "st_spattn_from": 0}),
    ("llava", {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "tied": True}),
    ("llava", {"layers": 3, "heads": 4, "kv_heads": 4, "side": 3, "st_spattn_from": 1}),
    ("llava", {"layers": 2, "heads": 6, "kv_heads": 3, "head_dim": 32}),
]
START = (3, 0, 3, 1, 1)  # the first sparse layer of each
PREFIX, QUESTION = 5, 7


class Twin:
    """A runner with both decoders, and the reference that sees and forgets the same; ``slots[layer][head]`` holds seqs."""

    def __init__(self, made: Any, start: int, engine: type[OnnxRuntimeCpu] = OnnxRuntimeCpu, seed: int = 0) -> None:
        self.runner, self.reference, self.start = Runner(made.bundle, 256, (), engine), ReferenceDecoder(made.checkpoint), start
        self.sparse = self.runner.engine.bind(self.runner.buffers, sparse=True)
        spec = self.runner.bundle.decoder
        self.p = self.runner.bundle.vision.tokens_per_frame
        self.slots = [[np.arange(0) for _ in range(spec.kv_heads)] for _ in range(spec.layers)]
        self.rng = np.random.default_rng(seed)
        self.append(PREFIX)
        self.append(self.p)  # frame 0
        self.frames = 1

    def append(self, count: int, pattern: FramePattern | None = None) -> float:
        """Append rows to both and return the largest difference of their logits."""
        first = self.runner.position
        embeds = (self.rng.standard_normal((count, self.runner.bundle.decoder.hidden)) * 0.3).astype(np.float32)
        sees = None if pattern is None else self.sees
        expected = self.reference.append(embeds, np.arange(first, first + count), sees)
        self.deviation = float(expected.std())
        decoder = None if pattern is None else self.sparse
        found = self.runner.step(embeds, range(count), decoder, pattern).logits
        for heads in self.slots:
            heads[:] = [np.concatenate([seq, np.arange(first, first + count)]) for seq in heads]
        return float(np.abs(found - expected).max())

    def sees(self, layer: int, new: Any, cached: Any) -> Any:
        if layer < self.start:
            return np.ones((1, 1), bool)
        same_frame = (new - PREFIX) // self.p == (cached - PREFIX) // self.p
        return (cached < PREFIX + self.p) | same_frame | (cached == new - self.p)

    def append_frames(self, count: int) -> float:
        error = self.append(count * self.p, self.pattern())
        self.frames += count
        return error

    def pattern(self) -> FramePattern:
        """Frame 1 has no previous token beside frame 0, which it sees whole."""
        previous = np.full((len(self.slots), len(self.slots[0]), self.p), -1, np.int64)
        wanted = PREFIX + (self.frames - 1) * self.p + np.arange(self.p)
        for layer, heads in enumerate(self.slots if self.frames > 1 else []):
            for head, held in enumerate(heads):
                here, slot = np.nonzero(wanted[:, None] == held[None, :])
                previous[layer, head, here] = slot
        return FramePattern(PREFIX + self.p, previous)

    def evict(self, share: float) -> None:
        """Other rows leave each head, never prefix and frame 0; a layer's heads lose equally many, layers do not."""
        r, protected = self.runner, PREFIX + self.p
        for layer, heads in enumerate(self.slots):
            n = len(heads[0])
            kept_count = protected + int((n - protected) * (share + 0.05 * (layer % 2)))
            for head, held in enumerate(heads):
                free = protected + self.rng.permutation(n - protected)[: kept_count - protected]
                kept = np.concatenate([np.arange(protected), free])  # the tail in any order
                for memory in (r.keys[layer], r.values[layer]):
                    memory[0, head, :kept_count] = memory[0, head, kept]
                    memory[0, head, kept_count:] = np.nan  # whoever reads it, fails
                heads[head] = held[kept]
                cache = self.reference.cache[layer][head]
                cache.keep(np.flatnonzero(np.isin(cache.seq, held[kept])))
            r.past_len[layer] = kept_count


def twin(exported: Any, which: int, engine: type[OnnxRuntimeCpu], seed: int = 0) -> Twin:
    family, shape = SHAPES[which]
    return Twin(exported(family, **shape), START[which], engine, seed)


@pytest.mark.parametrize("engine", [OnnxRuntimeCpu, WholeGraph])
@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_frames_and_a_dense_question_equal_the_reference(
    exported: Any, which: int, chunk: int, engine: type[OnnxRuntimeCpu]
) -> None:
    t = twin(exported, which, engine, seed=chunk)
    errors, absent, present = [], 0, 0
    for round_ in range(4):
        first = t.pattern().previous[t.start :]
        absent, present = absent + int((first < 0).sum()), present + int((first >= 0).sum())
        errors.append(t.append_frames(chunk))
        if round_ == 1:
            errors.append(t.append_frames(chunk))  # once with nothing evicted between
        t.evict(0.5)
    assert absent
    assert present
    errors.append(t.append(QUESTION))
    print(f"{SHAPES[which]} chunk {chunk}: errors to {max(errors):.1e}, logit deviation {t.deviation:.2f}")
    assert max(errors) < 1e-3


@pytest.mark.parametrize("engine", [OnnxRuntimeCpu, WholeGraph])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("which", [0, 2])
def test_rows_are_written_where_they_belong_and_nowhere_else(
    exported: Any, which: int, chunk: int, engine: type[OnnxRuntimeCpu]
) -> None:
    t = twin(exported, which, engine)
    t.append_frames(2)
    t.evict(0.6)
    r = t.runner
    for memory in (*r.keys, *r.values):
        memory[np.isnan(memory)] = 7  # a byte pattern to find again
    before = [memory.copy() for memory in (*r.keys, *r.values)]
    past = r.past_len.copy()
    t.append_frames(chunk)
    layers = len(past)
    for index, (old, new) in enumerate(zip(before, [*r.keys, *r.values], strict=True)):
        layer = index % layers
        start, end = past[layer], past[layer] + chunk * t.p
        assert (old[:, :, :start].view(np.uint32) == new[:, :, :start].view(np.uint32)).all()
        assert (old[:, :, end:].view(np.uint32) == new[:, :, end:].view(np.uint32)).all()
        for head in range(old.shape[1]):
            cache = t.reference.cache[layer][head]
            rows = cache.values if index >= layers else t.reference._rotate(cache.keys, cache.positions)
            assert np.abs(new[0, head, start:end] - rows[-chunk * t.p :]).max() < 1e-3

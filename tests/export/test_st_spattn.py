"""The st-spattn graph against the readable decoder with a mask, after other rows have left every layer and head."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from reference_decoder import ReferenceDecoder
from runner import Runner

from edgevlm.errors import CacheError, CacheFull, UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.decoder import GRAPHS
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

    def __init__(self, made: Any, start: int, seed: int = 0) -> None:
        self.runner, self.reference, self.start = Runner(made.bundle, 256), ReferenceDecoder(made.checkpoint), start
        self.sparse = self.runner.engine.bind(self.runner.buffers, variant="st-spattn")
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


def twin(exported: Any, which: int, seed: int = 0) -> Twin:
    family, shape = SHAPES[which]
    return Twin(exported(family, **shape), START[which], seed)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_frames_and_a_dense_question_equal_the_reference(exported: Any, which: int, chunk: int) -> None:
    t = twin(exported, which, seed=chunk)
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


@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_the_pattern_matters(exported: Any, which: int) -> None:
    """What the tests above compare differs from dense prefill, and from a pattern without the previous tokens, by far."""
    t = twin(exported, which)
    t.append_frames(2)
    dense, blind = twin(exported, which), twin(exported, which)
    dense.append(2 * t.p)
    blind.append_frames(1)
    blind.append(t.p, FramePattern(PREFIX + t.p, np.full_like(t.pattern().previous, -1)))
    last = slice(int(t.runner.past_len[0]) - t.p, int(t.runner.past_len[0]))
    for other in (dense, blind):
        for layer, (ours, theirs) in enumerate(zip(t.runner.keys, other.runner.keys, strict=True)):
            difference = np.abs(ours - theirs)[:, :, last].max()
            assert (difference < 1e-4) if layer <= t.start else (difference > 1e-3), f"layer {layer}"


@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_a_stream_of_one_frame_is_dense(exported: Any, which: int) -> None:
    t = twin(exported, which)
    assert t.append(QUESTION) < 1e-3


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("which", [0, 2])
def test_rows_are_written_where_they_belong_and_nowhere_else(exported: Any, which: int, chunk: int) -> None:
    t = twin(exported, which)
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


def test_probes_are_the_same_queries(exported: Any) -> None:
    """Below the first sparse layer, and at it, a probe cannot tell the variants apart."""
    t = twin(exported, 0)
    probes = tuple(range(5))
    dense = t.runner.engine.bind(t.runner.buffers, probes)
    sparse = t.runner.engine.bind(t.runner.buffers, probes, "st-spattn")
    rows = np.random.default_rng(1).standard_normal((2 * t.p, t.runner.bundle.decoder.hidden)).astype(np.float32)
    tables = t.runner.tables(np.arange(50, 50 + 2 * t.p, dtype=np.int32))
    one = sparse.step(rows, *tables, t.runner.past_len, (), t.pattern()).probes
    other = dense.step(rows, *tables, t.runner.past_len, ()).probes
    differences = [float(np.abs(one[layer] - other[layer]).max()) for layer in probes]
    assert max(differences[:4]) < 1e-5
    assert differences[4] > 1e-3


def test_what_does_not_fit_changes_nothing(exported: Any) -> None:
    t = twin(exported, 0)
    t.append_frames(1)
    r, good = t.runner, t.pattern()
    before = [memory.copy() for memory in (*r.keys, *r.values)]
    rows = np.zeros((t.p, r.bundle.decoder.hidden), np.float32)
    tables = r.tables(np.arange(t.p, dtype=np.int32))
    high, low = good.previous.copy(), good.previous.copy()
    high[1, 0, 0], low[0, 1, 2] = r.past_len[1], -2
    full = np.full_like(r.past_len, 250)
    cases: list[tuple[type[Exception], str, Any, Any, Any]] = [
        (CacheError, "needs a pattern", t.sparse, r.past_len, None),
        (CacheError, "takes no pattern", r.decoder, r.past_len, good),
        (CacheError, "whole frames", t.sparse, r.past_len, FramePattern(good.shared, good.previous[:, :, :-1])),
        (CacheError, "previous must be", t.sparse, r.past_len, FramePattern(good.shared, good.previous[:-1])),
        (CacheError, "shared slots", t.sparse, r.past_len, FramePattern(int(r.past_len[0]) + 1, good.previous)),
        (CacheError, "slots of valid rows", t.sparse, r.past_len, FramePattern(good.shared, high)),
        (CacheError, "slots of valid rows", t.sparse, r.past_len, FramePattern(good.shared, low)),
        (CacheFull, "more do not fit", t.sparse, full, good),
    ]
    for kind, message, decoder, past, pattern in cases:
        with pytest.raises(kind, match=message):
            decoder.step(rows, *tables, past, (), pattern)
    for old, new in zip(before, [*r.keys, *r.values], strict=True):
        assert (old == new).all()


def test_the_variant_is_a_small_file_beside_the_same_weights(exported: Any) -> None:
    made = exported(SHAPES[0][0], **SHAPES[0][1])
    graphs = {v: onnx.load(made.bundle / name, load_external_data=False).graph for v, name in GRAPHS.items() if v != "fp32-kv"}
    external = {
        variant: {t.name: t.SerializeToString() for t in graph.initializer if t.external_data}
        for variant, graph in graphs.items()
    }
    assert external["full"] == external["st-spattn"]
    assert (made.bundle / GRAPHS["st-spattn"]).stat().st_size < 100_000
    count = {op: sum(node.op_type == op for node in graphs["st-spattn"].node) for op in ("GroupQueryAttention", "Softmax")}
    assert count == {"GroupQueryAttention": 3, "Softmax": 2}


def test_where_it_starts(exported: Any, tmp_path: Any) -> None:
    made = exported("llava", layers=3, heads=4, kv_heads=4, side=3, st_spattn_from=1)
    for wrong in (3, -1):
        with pytest.raises(UserError, match=f"cannot start at layer {wrong}: the model has layers 0 to 2"):
            export_checkpoint(made.checkpoint, tmp_path / "bundle", st_spattn_from=wrong)
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_without_the_variant_says_what_to_do(exported: Any) -> None:
    runner = Runner(exported("llava", layers=3, heads=4, kv_heads=4, side=3, st_spattn_from=1).bundle)
    runner.bundle.decoder.graphs.pop("st-spattn")  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"no st-spattn decoder graph \(it has full, projections, per-layer\); export the checkpoint again"
    ):
        runner.engine.bind(runner.buffers, variant="st-spattn")

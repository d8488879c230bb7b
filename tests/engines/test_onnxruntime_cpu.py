"""The ONNX Runtime engine: what a step writes, what it refuses, what it holds on to."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from reference_decoder import ReferenceDecoder
from runner import Runner

from edgevlm.errors import CacheError, CacheFull, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import load_engine

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}


@pytest.fixture
def runner(exported: Any) -> Runner:
    return Runner(exported("llava", **SHAPE).bundle, capacity=64)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, 96)) * 0.2).astype(np.float32)


def fill(runner: Runner, seed: int = 1) -> list[np.ndarray]:
    """Random bytes in the whole memory; returns a copy of every array."""
    rng = np.random.default_rng(seed)
    arrays = [*runner.keys, *runner.values]
    for array in arrays:
        array[:] = rng.standard_normal(array.shape)
    return [array.copy() for array in arrays]


@pytest.mark.parametrize("count", [1, 2, 17])
def test_a_step_writes_exactly_its_rows(runner: Runner, count: int) -> None:
    before = fill(runner)
    past = np.array([0, 7, 64 - count], np.int32)
    cos, sin = runner.tables(np.arange(count, dtype=np.int32))
    runner.decoder.step(rows(count), cos, sin, past, (-1,))
    for index, (old, new) in enumerate(zip(before, [*runner.keys, *runner.values], strict=True)):
        start = past[index % 3]
        changed = (old.view(np.uint32) != new.view(np.uint32)).all(axis=(0, 1, 3))
        touched = (old.view(np.uint32) != new.view(np.uint32)).any(axis=(0, 1, 3))
        inside = np.isin(np.arange(64), np.arange(start, start + count))
        assert (changed == inside).all()
        assert (touched == inside).all()


def test_layers_may_hold_different_numbers_of_rows(exported: Any) -> None:
    """Rows dropped per layer and head, and the rest in any order, against the readable decoder."""
    made = exported("llava", **SHAPE)
    runner, reference = Runner(made.bundle, capacity=64), ReferenceDecoder(made.checkpoint)
    rng = np.random.default_rng(3)
    runner.step(rows(40))
    reference.append(rows(40), range(40))
    for layer, left in enumerate((5, 29, 40)):
        for head in range(2):
            kept = rng.permutation(40)[:left]
            for memory in (runner.keys[layer], runner.values[layer]):
                memory[0, head, :left] = memory[0, head, kept]
            reference.cache[layer][head].keep(kept)
        runner.past_len[layer] = left
    for count, seed in ((1, 5), (6, 6), (1, 7)):
        expected = reference.append(rows(count, seed), range(runner.position, runner.position + count))
        found = runner.step(rows(count, seed), range(count)).logits
        assert np.abs(found - expected).max() < 1e-3
        assert (found.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("count", [1, 5, 40])
def test_free_rows_are_never_read(runner: Runner, count: int) -> None:
    """Rows past the valid ones hold what an eviction left there: with NaN in them the logits are the same."""
    runner.step(rows(20))
    clean, runner.past_len[:] = None, (5, 12, 20)
    for left in (0.0, np.nan):
        for layer, held in enumerate(runner.past_len):
            runner.keys[layer][0, :, held:] = runner.values[layer][0, :, held:] = left
        past = runner.past_len.copy()
        found = runner.decoder.step(rows(count, 2), *runner.tables(np.arange(20, 20 + count, dtype=np.int32)), past, (0, -1))
        clean = found.logits.copy() if clean is None else clean
        np.testing.assert_array_equal(found.logits, clean)
        assert np.isfinite(clean).all()


def test_logit_rows(runner: Runner) -> None:
    everything = runner.step(rows(9), range(9)).logits
    for asked in ((), (-1,), (0, 8, 4), (-9,), (3, 3)):
        runner.past_len[:], runner.position = 0, 0
        found = runner.step(rows(9), asked).logits
        assert found.shape == (len(asked), runner.bundle.decoder.vocab)
        assert found.dtype == np.float32
        assert np.abs(found - everything[list(asked)]).max(initial=0) < 1e-5


def test_probes_are_the_rotated_queries(exported: Any) -> None:
    made = exported("llava", **SHAPE)
    runner, reference = Runner(made.bundle, 64, probes=(2, 0)), ReferenceDecoder(made.checkpoint)
    for count in (5, 1):
        start = runner.position
        probes = runner.step(rows(count)).probes
        assert sorted(probes) == [0, 2]
        normed = reference._norm(rows(count).astype(np.float64), "layers.0.input_layernorm")
        query = reference._heads(0, "q", normed)
        expected = np.stack([reference._rotate(head, np.arange(start, start + count)) for head in query])
        assert probes[2].shape == expected.shape == (6, count, 16)
        assert np.abs(probes[0] - expected).max() < 1e-4
    assert runner.decoder.step(rows(1), *runner.tables(np.array([9], np.int32)), runner.past_len).probes.keys() == {0, 2}


def test_a_step_that_does_not_fit_changes_nothing(runner: Runner) -> None:
    before = fill(runner)
    good = runner.tables(np.arange(4, dtype=np.int32))
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (CacheFull, "layer 1 holds 61 of 64 rows", (rows(4), *good, np.array([0, 61, 0], np.int32))),
        (CacheError, "embeds must be", (rows(4)[:, :5], *good, np.zeros(3, np.int32))),
        (CacheError, "embeds must be", (rows(0), *good, np.zeros(3, np.int32))),
        (CacheError, "cos and sin", (rows(3), *good, np.zeros(3, np.int32))),
        (CacheError, "past_len", (rows(4), *good, np.zeros(2, np.int32))),
        (CacheError, "past_len", (rows(4), *good, np.array([0, -1, 0], np.int32))),
        (CacheError, "logit_rows", (rows(4), *good, np.zeros(3, np.int32), (4,))),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            runner.decoder.step(*arguments)
    for old, new in zip(before, [*runner.keys, *runner.values], strict=True):
        assert (old.view(np.uint32) == new.view(np.uint32)).all()


def test_engine_choice(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.load(exported("llava", **SHAPE).bundle)
    with pytest.raises(UserError, match="unknown engine 'cuda'; did you mean 'onnxruntime-cuda'"):
        load_engine("cuda", bundle)
    for threads in (0, 257, 10**6):
        with pytest.raises(UserError, match=f"threads must be 1 to 256, not {threads}"):
            load_engine("onnxruntime-cpu", bundle, threads=threads)
    monkeypatch.delitem(sys.modules, "edgevlm.engines.onnxruntime_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"onnxruntime.*pip install .*\[cpu\]'"):
        load_engine("onnxruntime-cpu", bundle)


def test_a_graph_that_cannot_be_loaded_is_one_line(exported: Any, tmp_path: Any) -> None:
    import shutil

    folder = shutil.copytree(exported("llava", **SHAPE).bundle, tmp_path / "bundle")
    bundle = Bundle.load(folder)
    for name in ("vision.onnx", "decoder.onnx"):
        (folder / name).write_bytes(b"not a graph")
        with pytest.raises(UserError, match=name) as error:
            load_engine("onnxruntime-cpu", bundle)
        assert "\n" not in str(error.value)

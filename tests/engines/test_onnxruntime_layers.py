"""The CPU's decoder: compared with the full graph and the readable decoder with other rows in each head; what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from reference_decoder import ReferenceDecoder
from runner import Runner, WholeGraph

from edgevlm.engines.inputs import per_layer_files
from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import FramePattern
from edgevlm.runtime.plugins import names

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}
ONE_HEAD = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 32}
SIZES = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
BY_CODES: list[tuple[str, dict[str, Any]]] = [  # single rows are multiplied by the extension, in int4 all
    *(("llava", {"heads": 4, "head_dim": 32, "hidden": 128, "precision": precision}) for precision in ("int8", "int4")),
    ("qwen3_vl", {**SIZES, "precision": "int4"}),
    ("qwen2_vl", {**{name: size for name, size in SIZES.items() if name != "head_dim"}, "precision": "int8"}),
    ("qwen3_vl", {**SIZES, "precision": "int8"}),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in names("families")),
    ("llava", {**SHAPE, "kv": "fp16"}),
    ("llava", {**SHAPE, "kv": "int8"}),
    ("llava", {**SHAPE, "precision": "int8"}),
    ("llava", {**SHAPE, "precision": "int4"}),
    ("qwen3_vl", {**ONE_HEAD, "kv": "fp16", "precision": "int4"}),
    ("qwen3_vl", {"num_hidden_layers": 1, "kv": "int8"}),
]


@pytest.fixture
def runner(exported: Any) -> Runner:
    return Runner(exported("llava", **SHAPE).bundle, capacity=64)


def rows(count: int, seed: int = 0, width: int = 96) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, width)) * 0.2).astype(np.float32)


@pytest.mark.parametrize(("family", "shape"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_is_the_full_graph(exported: Any, family: str, shape: dict[str, Any]) -> None:
    """Frames, text, several logits and none: the same logits, queries and memory as ONNX Runtime's own attention gives."""
    made = exported(family, **shape)
    spec = Bundle.load(made.bundle).decoder
    ours, full = (Runner(made.bundle, 64, range(spec.layers), engine) for engine in (OnnxRuntimeCpu, WholeGraph))
    spread = 0.0
    for count, width, asked in ((9, spec.row_width, (-1,)), (1, spec.hidden, (0,)), (6, spec.row_width, range(6)),
                                (6, spec.hidden, (-1, 2)), (3, spec.hidden, ()), (1, spec.hidden, (-1,))):  # fmt: skip
        given = rows(count, count, width)
        expected, found = full.step(given, asked), ours.step(given, asked)
        assert found.logits.shape == expected.logits.shape
        spread = max(spread, float(expected.logits.std()) if asked else 0.0)
        limit = 1e-4 if (spec.kv, spec.precision) == ("fp32", "fp32") else 0.1  # the graph attends in fp16, or ties flip
        limit = 0.2 if spec.precision == "int8" else limit  # the graph does not round rows
        assert np.abs(found.logits - expected.logits).max(initial=0) < limit * max(1.0, spread)
        for layer, query in found.probes.items():
            assert query.shape == (spec.heads, count, spec.head_dim)
            assert np.abs(query - expected.probes[layer]).max() < limit
    assert spread > 1e-3
    for mine, theirs in zip([*ours.keys, *ours.values], [*full.keys, *full.values], strict=True):
        assert mine.any()
        assert np.abs(mine.astype(np.float64) - theirs).max() < (1.5 if spec.kv == "int8" else limit)
        assert (mine != theirs).mean() < 1e-2 or spec.kv != "int8", "numbers next to a tie alone may differ"


@pytest.mark.skipif(not kernels.multiplies_codes(), reason="the processor has no products of 8-bit codes")
@pytest.mark.parametrize(("family", "shape"), BY_CODES, ids=lambda value: value if isinstance(value, str) else "")
def test_rows_are_multiplied_as_onnx_runtime_does(
    exported: Any, monkeypatch: pytest.MonkeyPatch, family: str, shape: dict[str, Any]
) -> None:
    made = exported(family, **shape)
    spec, every = Bundle.load(made.bundle).decoder, range(3)
    ours, owned = Runner(made.bundle, 64, every), range(1 + (spec.precision == "int4") * spec.deepstack, 3)
    monkeypatch.setattr(kernels, "multiplies_codes", lambda: False)
    theirs = Runner(made.bundle, 64, every)
    for count in (9, 1, 1, 4, 1, 14):
        given = rows(count, count, spec.hidden)
        expected, found = theirs.step(given, (-1,)), ours.step(given, (-1,))
        # numbers next to a tie may go either way
        assert np.abs(found.logits - expected.logits).max() < 0.1 * expected.logits.std()
        if count == 1 or spec.precision == "int4":  # that it was the extension
            assert not any(np.array_equal(found.probes[layer], expected.probes[layer]) for layer in owned)


@pytest.mark.parametrize("listed", [False, True])
def test_every_head_may_see_other_rows_and_as_many_as_it_will(exported: Any, listed: bool) -> None:
    """As rows fetched after those that are valid, or as lists of those that are."""
    made = exported("llava", **SHAPE)
    runner, reference = Runner(made.bundle, capacity=64), ReferenceDecoder(made.checkpoint)
    random = np.random.default_rng(3)
    runner.step(rows(40))
    reference.append(rows(40), range(40))
    held = np.array([[5, 31], [29, 0], [40, 17]], np.int32)  # [layers, kv_heads]
    seen: list[list[np.ndarray]] = [[], [], []]
    for layer in range(3):
        for head in range(2):
            kept = random.permutation(40)[: held[layer, head]]
            seen[layer].append(kept.astype(np.int32))
            for memory in (runner.keys[layer], runner.values[layer]):
                if listed:
                    memory[0, head, np.setdiff1d(np.arange(64), kept)] = np.nan  # rows that nobody may read
                else:
                    memory[0, head, : len(kept)] = memory[0, head, kept]
                    memory[0, head, len(kept) :] = np.nan
            reference.cache[layer][head].keep(kept)
    least = held.min(1)

    def fetch(layer: int, _: Any) -> np.ndarray:
        return held[layer] - least[layer]

    for count, seed in ((1, 5), (6, 6), (1, 7)):
        places = np.arange(runner.position, runner.position + count, dtype=np.int32)
        expected = reference.append(rows(count, seed), places)
        given = rows(count, seed), *runner.tables(places)
        if listed:
            found = runner.decoder.step(*given, runner.past_len, range(count), rows=seen).logits
            new = np.arange(runner.past_len[0], runner.past_len[0] + count, dtype=np.int32)
            seen = [[np.concatenate([head, new]) for head in of_layer] for of_layer in seen]
            runner.past_len += count
        else:
            found = runner.decoder.step(*given, least, range(count), fetch=fetch).logits
            held, least = held + np.int32(count), least + np.int32(count)
        runner.position += count
        assert np.abs(found - expected).max() < 1e-3
        assert (found.argmax(1) == expected.argmax(1)).all()


def test_rows_put_between_two_layers_are_attended_to(runner: Runner) -> None:
    """What the memory holds when a layer is attended to counts, not when the call began."""
    tables = runner.tables(np.arange(12, 13, dtype=np.int32))
    runner.step(rows(12))
    expected = runner.decoder.step(rows(1, 1), *tables, runner.past_len).logits
    kept = [memory.copy() for memory in (*runner.keys, *runner.values)]
    for memory in (*runner.keys, *runner.values):
        memory[:] = np.nan

    def fetch(layer: int, _: Any) -> np.ndarray:
        runner.keys[layer][:], runner.values[layer][:] = kept[layer], kept[3 + layer]
        return np.full(2, 7, np.int32)

    found = runner.decoder.step(rows(1, 1), *tables, runner.past_len - np.int32(7), fetch=fetch).logits
    np.testing.assert_array_equal(found, expected)


def test_more_rows_than_fit_are_refused(runner: Runner) -> None:
    before = [memory.copy() for memory in (*runner.keys, *runner.values)]
    given = rows(4), *runner.tables(np.arange(4, dtype=np.int32)), np.zeros(3, np.int32)
    with pytest.raises(CacheError, match="4 rows do not fit after 61 of 64"):
        runner.decoder.step(*given, fetch=lambda *_: np.array([5, 61], np.int32))
    with pytest.raises(CacheError, match="rows must be below held"):
        runner.decoder.step(*given, rows=[[np.zeros(1, np.int32)] * 2] * 3)
    pattern = FramePattern(0, np.full((3, 2, 4), -1))
    with pytest.raises(CacheError, match="does not support patterns; bind it with sparse=True"):
        runner.decoder.step(*given, pattern=pattern)
    for old, new in zip(before, [*runner.keys, *runner.values], strict=True):
        np.testing.assert_array_equal(old, new)


def test_while_memory_is_short_nothing_is_kept_for_longer_calls(runner: Runner) -> None:
    decoder: Any = runner.decoder
    expected = [runner.step(rows(count)).logits for count in (5, 1)]
    assert decoder._many is not decoder._one
    runner.past_len[:], runner.position = 0, 0
    runner.engine.release_memory(True)
    for count, logits in zip((5, 1), expected, strict=True):
        assert (runner.step(rows(count)).logits == logits).all()
        assert decoder._many is decoder._one


@pytest.mark.parametrize(("family", "shape"), [("llava", {**SHAPE, "precision": "int4"}), ("qwen3_vl", {})])
def test_the_graphs_share_the_full_graphs_weights(exported: Any, family: str, shape: dict[str, Any]) -> None:
    """Each matrix is in one of them, as the very bytes that the full graph refers to; the rest of a graph is small."""
    bundle = Bundle.load(exported(family, **shape).bundle)

    def external(name: str) -> dict[str, tuple[str, ...]]:
        tensors = onnx.load(bundle.file(name), load_external_data=False).graph.initializer
        return {t.name: tuple(f"{e.key}={e.value}" for e in t.external_data) for t in tensors if t.external_data}

    parts = [external(name) for name in per_layer_files(bundle)]
    joined = {name: place for part in parts for name, place in part.items()}
    assert sum(map(len, parts)) == len(joined)
    assert joined == external(bundle.decoder.graphs["full"])
    assert all(bundle.files[name].bytes < 20_000 for name in per_layer_files(bundle))

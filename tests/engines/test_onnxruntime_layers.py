"""Per-layer graphs: compared with the full graph and the readable decoder with other rows in each head, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from reference_decoder import ReferenceDecoder
from runner import Layered, Runner

from edgevlm.engines.inputs import per_layer_files
from edgevlm.errors import CacheError, CacheFull
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.plugins import names

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}
ONE_HEAD = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 32}
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


def layered(runner: Runner) -> Layered:
    return Layered(runner.engine.bind_layers(runner.buffers), runner.bundle.decoder.kv_heads)


def same(before: list[np.ndarray], runner: Runner) -> bool:
    return all((old == new).all() for old, new in zip(before, [*runner.keys, *runner.values], strict=True))


@pytest.mark.parametrize(("family", "shape"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_is_the_full_graph(exported: Any, family: str, shape: dict[str, Any]) -> None:
    """Frames, text, several logits and none: the same logits, queries and memory."""
    made = exported(family, **shape)
    spec = Bundle.load(made.bundle).decoder
    full, per_layer = (Runner(made.bundle, 64, probes=range(spec.layers)) for _ in range(2))
    through, spread = layered(per_layer), 0.0
    for count, width, asked in ((9, spec.row_width, (-1,)), (1, spec.hidden, (0,)), (6, spec.row_width, range(6)),
                                (6, spec.hidden, (-1, 2)), (3, spec.hidden, ()), (1, spec.hidden, (-1,))):  # fmt: skip
        given = rows(count, count, width)
        expected = full.step(given, asked)
        found = per_layer.step(given, asked, through)
        assert found.logits.shape == expected.logits.shape
        spread = max(spread, float(expected.logits.std()) if asked else 0.0)
        assert np.abs(found.logits - expected.logits).max(initial=0) < 1e-4 * max(1.0, spread)
        for layer, query in enumerate(through.queries):
            assert query.shape == (spec.heads, count, spec.head_dim)
            assert np.abs(query - expected.probes[layer]).max() < 1e-4
    assert spread > 1e-3
    for mine, theirs in zip([*per_layer.keys, *per_layer.values], [*full.keys, *full.values], strict=True):
        assert mine.any()
        assert np.abs(mine.astype(np.float64) - theirs).max() < (1.5 if spec.kv == "int8" else 1e-4)
        assert (mine != theirs).mean() < 1e-2 or spec.kv == "fp32", "numbers next to a tie alone may differ"


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_logits_beside_transformers(exported: Any, family: str) -> None:
    import torch
    import transformers

    name = {"llava_onevision": "LlavaOnevision", "qwen3_vl": "Qwen3VL"}[family]
    made = exported(family)
    load = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained
    model, per_layer = load(made.checkpoint, dtype=torch.float32, local_files_only=True).eval(), Runner(made.bundle)
    ids, through = np.random.default_rng(0).integers(0, 200, 60), layered(per_layer)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids[None])).logits[0].numpy()
    parts = np.split(ids, [1, 20, 21])
    found = np.concatenate([per_layer.step(per_layer.embed(part), range(len(part)), through).logits for part in parts])
    assert np.abs(found - expected).max() < 1e-4 * max(1.0, float(expected.std()))
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_every_head_may_hold_other_rows_and_as_many_as_it_will(exported: Any) -> None:
    made = exported("llava", **SHAPE)
    runner, reference = Runner(made.bundle, capacity=64), ReferenceDecoder(made.checkpoint)
    through, random = layered(runner), np.random.default_rng(3)
    runner.step(rows(40), decoder=through)
    reference.append(rows(40), range(40))
    held = np.array([[5, 31], [29, 0], [40, 17]], np.int32)  # [layers, kv_heads]
    for layer in range(3):
        for head in range(2):
            kept = random.permutation(40)[: held[layer, head]]
            for memory in (runner.keys[layer], runner.values[layer]):
                memory[0, head, : len(kept)] = memory[0, head, kept]
                memory[0, head, len(kept) :] = np.nan  # rows that nobody may read
            reference.cache[layer][head].keep(kept)
    for count, seed in ((1, 5), (6, 6), (1, 7)):
        places = np.arange(runner.position, runner.position + count, dtype=np.int32)
        expected = reference.append(rows(count, seed), places)
        found = through.step(rows(count, seed), *runner.tables(places), held, range(count)).logits
        held, runner.position = held + np.int32(count), runner.position + count
        assert np.abs(found - expected).max() < 1e-3
        assert (found.argmax(1) == expected.argmax(1)).all()


def test_rows_put_between_two_layers_are_attended_to(runner: Runner) -> None:
    """What the memory holds when a layer is attended to counts, not when the call began."""
    through, tables = layered(runner), runner.tables(np.arange(12, 13, dtype=np.int32))
    runner.step(rows(12), decoder=through)
    expected = through.step(rows(1, 1), *tables, runner.past_len).logits
    kept = [memory.copy() for memory in (*runner.keys, *runner.values)]
    for memory in (*runner.keys, *runner.values):
        memory[:] = np.nan
    through.decoder.begin(rows(1, 1), *tables)
    for layer in range(3):
        runner.keys[layer][:], runner.values[layer][:] = kept[layer], kept[3 + layer]
        through.decoder.attend(layer, np.full(2, 12, np.int32))
    np.testing.assert_array_equal(through.decoder.logits(), expected)


def test_what_does_not_fit_changes_nothing(runner: Runner) -> None:
    decoder, good = runner.engine.bind_layers(runner.buffers), runner.tables(np.arange(4, dtype=np.int32))
    for memory in (*runner.keys, *runner.values):
        memory[:] = np.random.default_rng(1).standard_normal(memory.shape)
    before = [memory.copy() for memory in (*runner.keys, *runner.values)]
    begins: list[tuple[str, tuple[Any, ...]]] = [
        ("embeds must be", (rows(4)[:, :5], *good)),
        ("embeds must be", (rows(0), *good)),
        ("cos and sin", (rows(3), *good)),
        ("logit_rows", (rows(4), *good, (4,))),
    ]
    for message, arguments in begins:
        with pytest.raises(CacheError, match=message):
            decoder.begin(*arguments)
    with pytest.raises(CacheError, match="layer 0 cannot be attended to now: begin a call first"):
        decoder.attend(0, np.zeros(2, np.int32))
    with pytest.raises(CacheError, match="after the last layer"):
        decoder.logits()
    decoder.begin(rows(4), *good)
    attends: list[tuple[type[Exception], str, int, list[int]]] = [
        (CacheFull, "layer 0 attends to 61 rows of 64: 4 more do not fit", 0, [5, 61]),
        (CacheError, "past must be 2 lengths", 0, [5, -1]),
        (CacheError, "past must be 2 lengths", 0, [5]),
        (CacheError, "layer 1 cannot be attended to now: layer 0 is next", 1, [5, 5]),
    ]
    for kind, message, layer, past in attends:
        with pytest.raises(kind, match=message):
            decoder.attend(layer, np.array(past, np.int32))
    with pytest.raises(CacheError, match="after the last layer"):
        decoder.logits()
    assert same(before, runner)
    for layer in range(3):  # and the call goes on
        decoder.attend(layer, np.array([0, 60], np.int32))
    assert np.isfinite(decoder.logits()).all()
    with pytest.raises(CacheError, match="layer 3 cannot be attended to now: begin a call first"):
        decoder.attend(3, np.zeros(2, np.int32))


def test_while_memory_is_short_nothing_is_kept_for_longer_calls(runner: Runner) -> None:
    through = layered(runner)
    decoder: Any = through.decoder
    expected = [runner.step(rows(count), decoder=through).logits for count in (5, 1)]
    assert decoder._many is not decoder._one
    runner.past_len[:], runner.position = 0, 0
    runner.engine.release_memory(True)
    for count, logits in zip((5, 1), expected, strict=True):
        assert (runner.step(rows(count), decoder=through).logits == logits).all()
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

"""The projections graph: queries and keys of raw embeddings at every layer, against numpy, and against the whole graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from reference_decoder import ReferenceDecoder
from runner import Runner

from edgevlm.errors import UserError
from edgevlm.export.decoder import GRAPHS

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llava_onevision", {"layers": 5, "heads": 6, "kv_heads": 2, "side": 5}),
    ("llava", {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "tied": True}),
    ("llava", {"layers": 2, "heads": 6, "kv_heads": 3, "head_dim": 32}),
]
POSITIONS = np.array([70, 71, 72, 73, 900], np.int32)


def rows_of(runner: Runner) -> Any:
    return np.random.default_rng(3).standard_normal((len(POSITIONS), runner.bundle.decoder.hidden)).astype(np.float32)


@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_every_layer_projects_the_raw_embeddings(exported: Any, which: int) -> None:
    made = exported(SHAPES[which][0], **SHAPES[which][1])
    runner, reference = Runner(made.bundle), ReferenceDecoder(made.checkpoint)
    spec, embeds = runner.bundle.decoder, rows_of(runner)
    queries, keys = runner.engine.project(embeds, *runner.tables(POSITIONS))
    assert len(queries) == len(keys) == spec.layers
    for layer in range(spec.layers):
        normed = reference._norm(embeds.astype(np.float64), f"layers.{layer}.input_layernorm")
        for part, found, heads in (("q", queries[layer], spec.heads), ("k", keys[layer], spec.kv_heads)):
            assert found.shape == (heads, len(embeds), spec.head_dim)
            for head, rows in enumerate(reference._heads(layer, part, normed)):
                np.testing.assert_allclose(found[head], reference._rotate(rows, POSITIONS), atol=1e-4, rtol=1e-4)


def test_only_the_first_layer_is_that_of_a_forward(exported: Any) -> None:
    """Whose deeper queries come from what attention made of the embeddings."""
    runner = Runner(exported(SHAPES[0][0], **SHAPES[0][1]).bundle, probes=range(5))
    embeds, tables = rows_of(runner), runner.tables(POSITIONS)
    raw, _ = runner.engine.project(embeds, *tables)
    probes = runner.decoder.step(embeds, *tables, runner.past_len, ()).probes
    differences = [float(np.abs(raw[layer] - probes[layer]).max()) for layer in range(5)]
    assert differences[0] < 1e-5
    assert min(differences[1:]) > 1e-3


def test_it_is_a_small_file_beside_the_same_weights(exported: Any) -> None:
    made = exported(SHAPES[0][0], **SHAPES[0][1])
    whole, ours = (
        onnx.load(made.bundle / GRAPHS[variant], load_external_data=False).graph for variant in ("full", "projections")
    )
    external = [{t.name: t.SerializeToString() for t in g.initializer if t.external_data} for g in (whole, ours)]
    assert external[1]
    assert external[1].items() < external[0].items()
    assert (made.bundle / GRAPHS["projections"]).stat().st_size < 30_000
    assert not {node.op_type for node in ours.node} & {"GroupQueryAttention", "Softmax", "Gemm"}


def test_a_bundle_without_it_says_what_to_do(exported: Any) -> None:
    runner = Runner(exported("llava", layers=2, heads=6, kv_heads=3, head_dim=32).bundle)
    runner.bundle.decoder.graphs.pop("projections")  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"no projections decoder graph \(it has full, st-spattn, per-layer\); export the checkpoint again"
    ):
        runner.engine.project(rows_of(runner), *runner.tables(POSITIONS))

"""The projections graph: queries and keys of raw embeddings at every layer, against numpy, and against the whole graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_decoder import ReferenceDecoder
from runner import Runner

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

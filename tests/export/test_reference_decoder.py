"""The readable decoder against transformers, rows dropped and moved included: an oracle must be right itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from reference_decoder import ReferenceDecoder

SHAPES: list[dict[str, Any]] = [
    {"layers": 3, "heads": 6, "kv_heads": 2},
    {"layers": 2, "heads": 7, "kv_heads": 1, "head_dim": 16, "tied": True},
    {"layers": 1, "heads": 4, "kv_heads": 4, "rope_theta": 1e4},
]


def models(folder: Any, shape: dict[str, Any]) -> tuple[ReferenceDecoder, Any]:
    """The reference and transformers' language model, both float64, and the head."""
    import transformers

    make_checkpoint(folder, "llava", **shape)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    return ReferenceDecoder(folder), model


def run(model: Any, embeds: np.ndarray, positions: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
    """transformers' logits ``[S, vocab]`` of rows at given positions after a cache."""
    with torch.no_grad():
        output = model.model.language_model(
            inputs_embeds=torch.from_numpy(embeds)[None],
            position_ids=torch.from_numpy(positions)[None],
            past_key_values=cache,
            use_cache=True,
        )
        return model.lm_head(output.last_hidden_state)[0].numpy(), output.past_key_values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropped_and_moved_rows_equal_an_edited_transformers_cache(tmp_path: Any, shape: dict[str, Any]) -> None:
    """Other rows leave every layer and head, those that stay get new positions, and the stream continues."""
    reference, model = models(tmp_path, shape)
    rng = np.random.default_rng(1)
    embeds = rng.standard_normal((50, 96)) * 0.2
    _, cache = run(model, embeds[:40], np.arange(40))
    reference.append(embeds[:40], np.arange(40))
    for layer in range(reference.layers):
        stored = cache.layers[layer]
        keys, values = [], []
        for head in range(reference.kv_heads):
            kept = np.sort(rng.choice(40, 25, replace=False))
            moved = np.arange(25) + 3
            rotated = stored.keys[0, head].numpy()[kept]
            keys.append(_rotate(rotated, moved - kept, reference.inv_freq))
            values.append(stored.values[0, head].numpy()[kept])
            reference.cache[layer][head].keep(kept)
            reference.cache[layer][head].positions = moved
        stored.keys, stored.values = (torch.from_numpy(np.stack(part))[None] for part in (keys, values))
    expected, _ = run(model, embeds[40:], np.arange(28, 38), cache)
    found = reference.append(embeds[40:], np.arange(28, 38))
    assert np.abs(found - expected).max() < 1e-4
    assert [len(head) for layer in reference.cache for head in layer] == [35] * reference.layers * reference.kv_heads
    assert reference.cache[0][0].seq[-1] == 49


def _rotate(rows: np.ndarray, shift: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    turned = (rows[:, : rows.shape[1] // 2] + 1j * rows[:, rows.shape[1] // 2 :]) * np.exp(
        1j * shift[:, None] * inv_freq.astype(np.float64)
    )
    return np.concatenate([turned.real, turned.imag], axis=1)

"""A stream with everything kept answers as one transformers forward does, for every family and backbone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf import Video, answer, load, watch

from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model

QUESTION = "how many red circle are there now?"
SHAPES: list[tuple[str, int, float, dict[str, Any]]] = [  # family, frames, frames a second, the checkpoint's shape
    ("qwen2_vl", 9, 2.0, {"num_hidden_layers": 3}),
    ("qwen2_vl", 16, 2.0, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112, "tied": True}),
    ("qwen2_vl", 5, 1.0, {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "depth": 1}),
    ("qwen2_5_vl", 5, 2.0, {"num_hidden_layers": 3, "depth": 3}),
    ("qwen2_5_vl", 12, 1.0, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "tied": True}),
    ("qwen2_5_vl", 7, 3.0, {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}),
    ("qwen3_vl", 9, 2.0, {"num_hidden_layers": 3, "head_dim": 32}),
    ("qwen3_vl", 8, 0.1, {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16, "tied": True}),
    ("qwen3_vl", 5, 4.0, {"num_hidden_layers": 1, "head_dim": 24, "attention_bias": True}),
    ("smolvlm", 5, 1.0, {"num_hidden_layers": 3}),
    ("smolvlm", 4, 0.01, {"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 112, "tied": True, "side": 9,
                          "scale_factor": 3}),
    ("smolvlm", 7, 2.0, {"num_hidden_layers": 1, "num_key_value_heads": 1, "attention_bias": True}),
    *((family, 16, 1.0, shape) for family, shape in [
        ("llava_onevision", {"layers": 3, "heads": 6, "kv_heads": 2, "side": 5}),
        ("llava_onevision", {"layers": 2, "heads": 7, "kv_heads": 1, "head_dim": 16, "tied": True, "feature_layer": -2}),
        ("llava_onevision", {"layers": 1, "heads": 7, "kv_heads": 7, "head_dim": 8, "side": 3, "vision_layers": 3}),
        ("llava_onevision", {"dtype": torch.bfloat16, "shard_size": "100KB", "feature_layer": [-2, -1]}),
        ("llava_onevision", {"backbone": "qwen3", "biases": True, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16}),
        ("llava_onevision", {"backbone": "llama", "layers": 2, "heads": 6, "kv_heads": 3, "tied": True, "rope_theta": 1e5}),
        ("llava", {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "tied": True}),
        ("llava", {"layers": 5, "heads": 4, "kv_heads": 4, "rope_theta": 1e4}),
        ("llava", {"layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 32, "side": 3, "dtype": torch.float16}),
        ("llava", {"tower": "clip", "backbone": "llama", "layers": 3, "heads": 4, "kv_heads": 1, "feature_layer": -2}),
        ("llava", {"tower": "clip", "backbone": "llama", "biases": True, "layers": 2, "heads": 7, "kv_heads": 7, "hidden": 112,
                   "head_dim": 16}),
        ("llava", {"tower": "clip", "backbone": "qwen3", "layers": 1, "heads": 6, "kv_heads": 2, "head_dim": 32}),
        ("llava_next_video", {"tower": "clip", "backbone": "llama", "layers": 3, "heads": 6, "kv_heads": 1, "side": 5}),
        ("llava_next_video", {"tower": "clip", "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32,
                              "feature_layer": [-2, -1]}),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "frames", "fps", "shape"), SHAPES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_any_chunking_answers_as_one_forward_does(
    exported: Any, family: str, frames: int, fps: float, shape: dict[str, Any]
) -> None:
    made = exported(family, **shape)
    model, oracle = Model.load(made.bundle, threads=1), load(made.checkpoint, family)
    vision, chat = model.bundle.vision, Chat(model.bundle.chat, model.tokenizer)
    pixels = np.random.default_rng(frames).standard_normal((frames, 3, *vision.size)).astype(np.float32)
    prefix, suffix = chat.prefix, chat.suffix([], QUESTION)
    video = Video(oracle, family, model.encode, pixels, fps, prefix, suffix)
    for chunk in (1, 3, 16):
        stream = watch(model, pixels, fps, chunk)
        tokens, logits = answer(model, stream, suffix, 16)
        expected = video.logits(tokens)[len(video.ids) - 1 : -1]
        error = float(np.abs(logits - expected).max())
        print(f"{family} {shape} chunk {chunk}: max error {error:.1e}, logit deviation {expected.std():.2f}")
        assert error < (1e-3 if family.startswith("llava") else 1e-4)
        assert tokens == expected.argmax(1).tolist()
        assert stream.cache.lengths.tolist() == [len(video.ids) + 16] * model.bundle.decoder.layers
    assert len(set(tokens)) > 1
    _, backwards = answer(model, watch(model, pixels[::-1], fps, 16), suffix, 1)
    assert np.abs(backwards[0] - logits[0]).max() > 2e-3  # what was seen, and in which order, does matter
    model.close()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_of_the_newest_transformers(exported: Any, family: str) -> None:
    """Its get_rope_index, for a video that has passed its rows and columns; no others than these give its logits."""
    made = exported(family, positions="transformers")
    model, oracle = Model.load(made.bundle, threads=1), load(made.checkpoint, family)
    pixels = np.random.default_rng(0).standard_normal((16, 3, *model.bundle.vision.size)).astype(np.float32)
    chat = Chat(model.bundle.chat, model.tokenizer)
    prefix, suffix = chat.prefix, chat.suffix([], QUESTION)
    video = Video(oracle, family, model.encode, pixels, 1.0, prefix, suffix, trained=False)
    tokens, logits = answer(model, watch(model, pixels, 1.0, 4), suffix, 8)
    expected = video.logits(tokens)[len(video.ids) - 1 : -1]
    assert float(np.abs(logits - expected).max()) < 1e-4
    model.close()
    trained = Model.load(made.bundle, threads=1, positions="trained")
    _, others = answer(trained, watch(trained, pixels, 1.0, 4), suffix, 1)
    assert float(np.abs(others[0] - expected[0]).max()) > 1e-3
    trained.close()

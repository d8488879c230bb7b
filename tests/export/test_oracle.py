"""A bundle answers as the checkpoint does: logits and greedy tokens against one transformers forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from runner import Runner

FRAMES = 16
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llava_onevision", {"layers": 3, "heads": 6, "kv_heads": 2, "side": 5}),
    ("llava_onevision", {"layers": 2, "heads": 7, "kv_heads": 1, "head_dim": 16, "tied": True, "feature_layer": -2}),
    ("llava_onevision", {"layers": 1, "heads": 7, "kv_heads": 7, "head_dim": 8, "side": 3, "vision_layers": 3}),
    ("llava_onevision", {"dtype": torch.bfloat16, "shard_size": "100KB", "feature_layer": [-2, -1]}),
    ("llava", {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "tied": True}),
    ("llava", {"layers": 5, "heads": 4, "kv_heads": 4, "rope_theta": 1e4}),
    ("llava", {"layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 32, "side": 3, "dtype": torch.float16}),
    ("llava", {"tower": "clip", "backbone": "llama", "layers": 3, "heads": 4, "kv_heads": 1, "feature_layer": -2}),
    (
        "llava",
        {
            "tower": "clip",
            "backbone": "llama",
            "biases": True,
            "layers": 2,
            "heads": 7,
            "kv_heads": 7,
            "hidden": 112,
            "head_dim": 16,
        },
    ),
    ("llava", {"tower": "clip", "backbone": "qwen3", "layers": 1, "heads": 6, "kv_heads": 2, "tied": True, "head_dim": 32}),
    ("llava_onevision", {"backbone": "qwen3", "biases": True, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16}),
    ("llava_onevision", {"backbone": "llama", "layers": 2, "heads": 6, "kv_heads": 3, "tied": True, "rope_theta": 1e5}),
    ("llava_next_video", {"tower": "clip", "backbone": "llama", "layers": 3, "heads": 6, "kv_heads": 1, "side": 5}),
    ("llava_next_video", {"tower": "clip", "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "feature_layer": [-2, -1]}),
    (
        "llava_next_video",
        {"tower": "clip", "backbone": "llama", "layers": 2, "heads": 7, "kv_heads": 7, "hidden": 112, "head_dim": 16},
    ),
]


def transformers_model(folder: Any, family: str) -> Any:
    import transformers

    name = {"llava": "Llava", "llava_next_video": "LlavaNextVideo", "llava_onevision": "LlavaOnevision"}[family]
    model = (
        getattr(transformers, f"{name}ForConditionalGeneration")
        .from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        .eval()
    )
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_and_greedy_tokens_equal_transformers(exported: Any, family: str, shape: dict[str, Any]) -> None:
    made = exported(family, **shape)
    model = transformers_model(made.checkpoint, family)
    runner = Runner(made.bundle)
    vision, chat = runner.bundle.vision, runner.bundle.chat
    pixels = np.random.default_rng(7).standard_normal((FRAMES, 3, *vision.size)).astype(np.float32)
    prefix = runner.tokens("<|im_start|>system\nyou watch<|im_end|>\n<|im_start|>user\n")
    suffix = runner.tokens("\nhow many red circle are there now?<|im_end|>\n<|im_start|>assistant\n")
    closing = runner.bundle.closing_rows()
    assert len(closing) == (family == "llava_onevision")
    count = FRAMES * vision.tokens_per_frame
    ids = torch.tensor([prefix + [chat.placeholder_id] * (count + len(closing)) + suffix])
    tensor = torch.from_numpy(pixels)
    inputs = {"pixel_values_videos": tensor[None]} if family != "llava" else {"pixel_values": tensor}
    with torch.no_grad():
        expected = model(input_ids=ids, **inputs).logits[0].numpy()
        tokens = model.generate(input_ids=ids, **inputs, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    text = [*range(len(prefix)), *range(len(prefix) + count, ids.shape[1])]

    for chunk in (1, 3, 16):
        runner.past_len[:], runner.position = 0, 0
        rows, logits = [], []

        def append(embeds: np.ndarray, every_row: bool, rows: list[int] = rows, logits: list[Any] = logits) -> None:
            start = runner.position
            result = runner.step(embeds, range(len(embeds)) if every_row else (-1,))
            rows += range(start if every_row else start + len(embeds) - 1, start + len(embeds))
            logits.append(result.logits)

        append(runner.embed(prefix), True)
        for start in range(0, FRAMES, chunk):
            features = runner.engine.encode(pixels[start : start + chunk])
            append(features.reshape(-1, runner.bundle.decoder.hidden), False)
        append(np.concatenate([closing, runner.embed(suffix)]), True)
        found = np.concatenate(logits)
        assert set(text) <= set(rows)
        error = float(np.abs(found - expected[rows]).max())
        print(f"{family} {shape} chunk {chunk}: max error {error:.1e}, logit deviation {expected.std():.2f}")
        assert error < 1e-3
        assert runner.greedy(found[-1], 16) == tokens
    assert len(set(tokens)) > 2
    runner.past_len[:], runner.position = 0, 0
    runner.step(runner.embed(prefix), ())
    runner.step(runner.engine.encode(pixels[::-1].copy()).reshape(-1, runner.bundle.decoder.hidden), ())
    other = runner.step(np.concatenate([closing, runner.embed(suffix)])).logits[0]
    assert np.abs(other - expected[-1]).max() > 2e-3  # what was seen, and in which order, does matter


def test_the_same_checkpoint_makes_the_same_bytes(exported: Any, tmp_path: Any) -> None:
    from edgevlm.export import export_checkpoint

    made = exported("llava", layers=3, heads=6, kv_heads=3, head_dim=32, side=3, dtype=torch.float16)
    again = export_checkpoint(made.checkpoint, tmp_path / "again")
    for path in sorted(made.bundle.iterdir()):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_frame_is_encoded_alike_alone_and_in_company(exported: Any) -> None:
    made = exported("llava_onevision", layers=3, heads=6, kv_heads=2, side=5)
    runner = Runner(made.bundle)
    pixels = np.random.default_rng(1).standard_normal((5, 3, 70, 70)).astype(np.float32)
    together = runner.engine.encode(pixels)
    alone = np.concatenate([runner.engine.encode(pixels[i : i + 1]) for i in range(5)])
    assert together.shape == (5, 9, 96)
    assert np.abs(together - alone).max() < 1e-5
    assert runner.engine.encode(pixels[:0]).shape == (0, 9, 96)

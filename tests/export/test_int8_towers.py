"""int8 towers with outliers as published towers have them: features beside transformers' in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hf import load, patchify
from more_checkpoints import FRAME, make_more

from edgevlm.export import export_checkpoint
from edgevlm.export.precisions.layouts import Channels
from edgevlm.export.rotation import MeanKeeping
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import TowerBuffer, load_engine

OLD = "DynamicQuantizeMatMul"
OUTLIERS, NEURON = [5, 18], 7
TOWERS: dict[str, dict[str, Any]] = {
    "siglip": {"family": "llava", "tower": "siglip", "side": 6, "vision_layers": 4, "feature_layer": -2},
    "clip": {
        "family": "llava", "tower": "clip", "side": 6, "vision_layers": 4, "feature_layer": -2, "sharp": True, "scale": 4.0,
    },
    "qwen2_vl": {"depth": 4, "sharp": True},
    "qwen2_5_vl": {"depth": 4, "sharp": True},
    "qwen3_vl": {"depth": 4, "sharp": True},
}  # fmt: skip
READERS = {
    "norm1": ("q_proj", "k_proj", "v_proj", "qkv"), "norm2": ("fc1", "gate_proj", "up_proj"),
    "ln_q": ("mlp.0",), "norm": ("linear_fc1",),
}  # fmt: skip


def of(module: Any, *ends: str) -> list[Any]:
    return [part for name, part in module.named_modules() if name.endswith(ends)]


def wanted(model: Any, family: str, pixels: np.ndarray) -> np.ndarray:
    """transformers' features ``[tokens, width]``."""
    with torch.no_grad():
        if family == "llava":
            return torch.cat(list(model.get_image_features(torch.from_numpy(pixels)).pooler_output)).numpy()
        patches, grid = patchify(pixels, 7, 2)
        theirs = model.get_video_features(patches, torch.tensor([grid]))
        layers = [theirs.pooler_output, *getattr(theirs, "deepstack_features", [])]
        return torch.cat([torch.cat(list(layer)) for layer in layers], -1).numpy()


@torch.no_grad()
def plant(model: Any, family: str, pixels: np.ndarray) -> None:
    """Outlying channels of the residual stream and of norms, and a neuron that one token fires, into such a channel."""
    tower = model.visual if "qwen" in family else model.vision_tower
    blocks = [part for part in tower.modules() if type(part).__name__.endswith(("EncoderLayer", "VisionBlock"))]
    seen: list[Any] = []
    hooks = [blocks[0].register_forward_pre_hook(lambda _, rows: seen.append(rows[0]))]
    wanted(model, family, pixels)
    size = 20 * seen[0].std()
    [patches] = of(tower, "patch_embedding", "patch_embed.proj")
    [*norms] = of(tower, "pre_layrnorm")
    if norms or patches.bias is not None:
        (norms or [patches])[0].bias[OUTLIERS] += size
    else:
        patches.weight[OUTLIERS] *= 20
    mergers = [part for part in tower.modules() if type(part).__name__.endswith("PatchMerger")]
    for block in [*blocks, *mergers]:
        for norm, readers in READERS.items():
            for parameter in (parameter for part in of(block, norm) for parameter in part.parameters()):
                parameter[OUTLIERS] *= 30
            for reader in of(block, *readers) if of(block, norm) else []:
                reader.weight.view(len(reader.weight), -1, len(parameter))[..., OUTLIERS] /= 30
    first = of(blocks[1], "fc1", "gate_proj")[0]
    hooks.append(first.register_forward_pre_hook(lambda _, rows: seen.append(rows[0].flatten(0, -2))))
    wanted(model, family, pixels)
    rows = seen[-1].clone()
    rows[:, OUTLIERS] = 0
    direction = rows[3] - rows.mean(0)
    score = rows @ direction
    second, best = score.topk(2).values.flip(0)
    first.weight[NEURON] = direction / (best - second) * 200
    first.bias[NEURON] = -(best + second) / (best - second) * 100
    for gate in of(blocks[1], "up_proj"):
        gate.weight[NEURON], gate.bias[NEURON] = 0, 1
    [last] = of(blocks[1], "fc2", "down_proj")
    last.weight[:, NEURON] = 0
    last.weight[OUTLIERS[0], NEURON] = size / 100
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("kind", TOWERS)
def test_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The way of before, one scale for all activations of a call, loses the features."""
    shape = dict(TOWERS[kind])
    family = shape.pop("family", kind)
    checkpoint = (make_checkpoint if family == "llava" else make_more)(tmp_path / "checkpoint", family, **shape)
    size = Bundle.load(export_checkpoint(checkpoint, tmp_path / "plain", camera=FRAME)).vision.size
    pixels = np.random.default_rng(0).standard_normal((8, 3, *size)).astype(np.float32)
    full = load(checkpoint, family)
    plant(full.model, family, pixels)
    full.save_pretrained(checkpoint)
    exact, errors = wanted(full.model, family, pixels), []
    for before in (False, True):
        if before:
            monkeypatch.setattr(MeanKeeping, "of", lambda width: None)
            monkeypatch.setattr(Channels, "multiply", lambda _, g, name, rows, parts, *__: g.fused(OLD, [rows, *parts], [name]))
        bundle = Bundle.load(export_checkpoint(checkpoint, tmp_path / f"{before}", camera=FRAME, vision_precision="int8"))
        engine = load_engine("onnxruntime-cpu", bundle, threads=1)
        found = engine.encode(pixels).reshape(exact.shape)
        spread = np.linalg.norm(exact - exact.mean(0), axis=1)
        errors.append(float(np.median(np.linalg.norm(found - exact, axis=1) / spread)))
        if not before:
            group = bundle.vision.group
            alone = [engine.encode(pixels[index : index + group]) for index in range(0, len(pixels), group)]
            np.testing.assert_array_equal(np.concatenate(alone).reshape(exact.shape), found)
            spec = bundle.vision.changed
            tower = engine.bind_tower(TowerBuffer.of(np.zeros(spec.cache_bytes, np.uint8)))
            again, _ = tower.encode(pixels[:group] if group > 1 else pixels[0], np.arange(spec.patches, dtype=np.int32))
            assert np.abs(again - alone[0][0]).max() < 0.02 * exact.std(), "every patch changed"
    print(f"{kind}: error of the median token {errors[1]:.3f} before, {errors[0]:.3f} now")
    assert errors[0] < 0.16
    assert errors[1] > 4 * errors[0]

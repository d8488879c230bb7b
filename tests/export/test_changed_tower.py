"""Changed patches alone give what transformers' tower gives where all other patches stay as they were last computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf import load, patchify
from numpy.typing import NDArray

from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Engine, TowerBuffer, load_engine

Float32 = NDArray[np.float32]
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("llava", {"tower": "clip", "feature_layer": -2, "side": 6, "vision_layers": 3}),
    "siglip": ("llava", {"tower": "siglip", "feature_layer": [-1, 0, 1]}),
    "pooled before": ("llava_next_video", {"tower": "clip", "feature_layer": [-2, -1], "side": 5}),
    "pooled behind": ("llava_onevision", {"side": 5, "vision_layers": 3}),
    "shuffled": ("smolvlm", {"side": 6, "scale_factor": 3}),
    "frame pairs": ("qwen2_vl", {"sharp": True}),
    "windows": ("qwen2_5_vl", {"depth": 3, "sharp": True}),
    "deepstack": ("qwen3_vl", {"depth": 3, "sharp": True}),
}


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest, exported: Callable[..., Any]) -> tuple[str, Any]:
    family, shape = TOWERS[request.param]
    return family, exported(family, **shape)


class Stream:
    """Frames of one stream through an engine's tower."""

    def __init__(self, engine: Engine, bundle: Bundle) -> None:
        assert bundle.vision.changed is not None
        self.vision, self.spec = bundle.vision, bundle.vision.changed
        self.memory = np.zeros(self.spec.cache_bytes, np.uint8)
        self.tower = engine.bind_tower(TowerBuffer.of(self.memory))
        self.random = np.random.default_rng(0)

    def frame(self) -> Float32:
        lead = () if self.vision.group == 1 else (self.vision.group,)
        return self.random.standard_normal((*lead, 3, *self.vision.size)).astype(np.float32)

    def some(self, count: int) -> NDArray[np.int32]:
        return np.sort(self.random.choice(self.spec.patches, count, replace=False)).astype(np.int32)

    @property
    def all(self) -> NDArray[np.int32]:
        return np.arange(self.spec.patches, dtype=np.int32)


class StaleTransformers:
    """transformers' tower, in which every layer's rows of unchanged patches are replaced by what they last were."""

    def __init__(self, folder: Path, family: str, grid: tuple[int, int]) -> None:
        self.model, self.family, self.grid = load(folder, family).model, family, grid
        self.mask = torch.zeros(0, dtype=torch.bool)
        ends = ("VisionEmbeddings", "PatchEmbed", "EncoderLayer", "VisionBlock")
        visual = self.model.visual if "qwen" in family else getattr(self.model, "vision_tower", None) or self.model.vision_model
        places = [(name, module) for name, module in visual.named_modules() if type(module).__name__.endswith(ends)]
        assert len(places) > 2
        for name, module in places:
            module.forward = self.mixed(module.forward, in_windows="blocks" in name)
        self.visual = visual

    def mixed(self, forward: Callable[..., Any], in_windows: bool) -> Callable[..., Any]:
        kept: list[torch.Tensor] = []

        def run(*given: Any, **named: Any) -> Any:
            found = forward(*given, **named)
            rows = found[0] if isinstance(found, tuple) else found
            mask = self.placed(in_windows)
            if rows.shape[-2] == len(mask) + 1:
                mask = torch.cat([torch.ones(1, dtype=torch.bool), mask])  # the class token
            if kept:
                rows = torch.where(mask[:, None], rows, kept.pop())
            kept.append(rows)
            return (rows, *found[1:]) if isinstance(found, tuple) else rows

        return run

    def placed(self, in_windows: bool) -> torch.Tensor:
        """Which rows changed, in the order that they have there."""
        if "qwen" not in self.family:
            return self.mask
        rows, columns = (edge // 2 for edge in self.grid)
        squares = self.mask.reshape(rows, 2, columns, 2).permute(0, 2, 1, 3).reshape(rows * columns, 4)
        if in_windows and self.family == "qwen2_5_vl":
            vision = self.visual.config
            side, numbers = vision.window_size // vision.patch_size // 2, np.arange(rows * columns).reshape(rows, columns)
            starts = [(top, left) for top in range(0, rows, side) for left in range(0, columns, side)]
            squares = squares[np.concatenate([numbers[y : y + side, x : x + side].reshape(-1) for y, x in starts])]
        return squares.reshape(-1)

    def tokens(self, pixels: Float32, patches: NDArray[np.int32]) -> Float32:
        """All tokens of a frame ``[tokens, width]`` of which ``patches`` are computed."""
        self.mask = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.bool)
        self.mask[torch.from_numpy(patches.astype(np.int64))] = True
        tensor = torch.from_numpy(pixels)
        with torch.no_grad():
            if "qwen" in self.family:
                given, grid = patchify(pixels, 7, 2)
                theirs = self.model.get_video_features(given, torch.tensor([grid]))
                layers = [theirs.pooler_output, *getattr(theirs, "deepstack_features", [])]
                found = torch.cat([torch.cat(list(layer)) for layer in layers], -1)
            elif self.family == "llava":
                found = self.model.get_image_features(tensor[None]).pooler_output[0]
            elif self.family == "smolvlm":
                found = self.model.get_image_features(tensor[None, None]).pooler_output[0]
            else:
                found = self.model.get_video_features(tensor[None, None]).pooler_output[0]
        rows: Float32 = found.reshape(-1, found.shape[-1]).numpy()
        return rows


def test_stale_rows_as_transformers_has_them(tower: tuple[str, Any]) -> None:
    family, made = tower
    bundle = Bundle.load(made.bundle)
    engine = load_engine("onnxruntime-cpu", bundle, threads=1)
    stream = Stream(engine, bundle)
    oracle = StaleTransformers(made.checkpoint, family, stream.spec.grid)
    count, whole = stream.spec.patches, None
    for patches in (stream.all, stream.some(1), stream.some(count // 2), stream.some(count - 1), stream.some(2), stream.all):
        pixels = stream.frame()
        features, tokens = stream.tower.encode(pixels, patches)
        wanted = oracle.tokens(pixels, patches)[: bundle.vision.tokens_per_frame]
        deviation = wanted.std()
        error = np.abs(features - wanted[tokens]).max(initial=0) / deviation
        print(f"{family} {len(patches)} of {count} patches, {len(tokens)} tokens: error {error:.1e}")
        assert error < 1e-5
        others = np.setdiff1d(np.arange(len(wanted)), tokens)
        if whole is not None:
            assert np.abs(wanted - whole)[others].max(initial=0) < 1e-5 * deviation, "tokens left out do not change"
            assert np.abs(wanted - whole)[tokens].max(1).min(initial=1) > 1e-3 * deviation, "tokens computed do"
        whole = wanted
        if len(patches) == count:
            assert list(tokens) == list(range(bundle.vision.tokens_per_frame))
            full = engine.encode(pixels.reshape(-1, 3, *bundle.vision.size))[0]
            assert np.abs(features - full).max() < 1e-5 * deviation


def test_nothing_changed_is_nothing_computed_and_state_is_the_caller_s(tower: tuple[str, Any]) -> None:
    bundle = Bundle.load(tower[1].bundle)
    engine = load_engine("onnxruntime-cpu", bundle, threads=1)
    stream, other = Stream(engine, bundle), Stream(engine, bundle)
    stream.tower.encode(stream.frame(), stream.all)
    before, nothing = stream.memory.copy(), np.zeros(0, np.int32)
    features, tokens = stream.tower.encode(stream.frame(), nothing)
    assert features.shape == (0, bundle.decoder.row_width)
    assert tokens.shape == (0,)
    for patches in ([-1], [stream.spec.patches], [1, 0], [1, 1]):
        with pytest.raises(ValueError, match="sorted, unique"):
            stream.tower.encode(stream.frame(), np.array(patches, np.int32))
    with pytest.raises(ValueError, match="pixels must be float32"):
        stream.tower.encode(stream.frame()[..., :-1], nothing)
    assert np.array_equal(stream.memory, before)
    other.memory[:] = before
    frame, patches = stream.frame(), stream.some(3)
    for mine, theirs in zip(stream.tower.encode(frame, patches), other.tower.encode(frame, patches), strict=True):
        assert np.array_equal(mine, theirs)
    assert np.array_equal(stream.memory, other.memory)
    assert not np.array_equal(stream.memory, before)

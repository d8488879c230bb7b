"""What the exporter reads of a checkpoint before anything is written: settings, names, and what a family refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engine_runner import opened
from hf import load, patchify
from more_checkpoints import make_more

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import FamilyParts, load_family
from edgevlm.export.vision import GRAPH, write_vision


def parts(folder: Path, camera: tuple[int, int] = (56, 84)) -> FamilyParts:
    checkpoint = Checkpoint(folder)
    found: FamilyParts = load_family(checkpoint.config["model_type"], folder).parts(checkpoint, camera)
    return found


def features(folder: Path, made: FamilyParts, pixels: np.ndarray, precision: str = "fp32", standard: bool = False) -> Any:
    """What the tower's graph gives."""
    out = folder.with_name(f"tower-{precision}-{standard}")
    out.mkdir(exist_ok=True)
    write_vision(made.vision, Checkpoint(folder), out, precision, standard)
    return opened(out / GRAPH).run(None, {"pixel_values": pixels})[0]


def change(folder: Path, section: str, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config).update(settings)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_towers_equal_those_of_transformers_at_any_grid(tmp_path: Path, family: str) -> None:
    """One graph for all, and one for each, of ONNX's own operators; in windows that the grid divides and that it does not.

    The features of every layer that DeepStack taps; each alone.
    """
    folder = make_more(tmp_path / "checkpoint", family, depth=3, sharp=True)
    model = load(folder, family).model
    write_vision(parts(folder).vision, Checkpoint(folder), tmp_path)
    any_size = opened(tmp_path / GRAPH)
    for camera in [(56, 84), (98, 56), (40, 150), (14, 14), (126, 154)]:
        made = parts(folder, camera)
        pixels = np.random.default_rng(0).standard_normal((2, 6, *made.vision.size)).astype(np.float32)
        patches, grid = patchify(pixels.reshape(4, 3, *made.vision.size), 7, 2)
        with torch.no_grad():
            theirs = model.get_video_features(patches, torch.tensor([grid]))
        layers = [theirs.pooler_output, *getattr(theirs, "deepstack_features", [])]
        expected = torch.cat([torch.cat(list(layer)) for layer in layers], -1).reshape(2, math.prod(made.grid), -1).numpy()
        deviation = expected.std()
        for found in (any_size.run(None, {"pixel_values": pixels})[0], features(folder, made, pixels, "fp32", standard=True)):
            assert np.abs(found - expected).max() < 1e-5 * deviation
        assert np.abs(features(folder, made, pixels, "fp16", standard=True) - expected).max() < 0.02 * deviation
        alone = np.concatenate([any_size.run(None, {"pixel_values": pixels[index : index + 1]})[0] for index in range(2)])
        assert np.abs(alone - expected).max() < 1e-5 * deviation
        assert math.prod(made.grid) == 1 or expected.std(1).mean() > 0.2 * deviation, "what is seen matters"


def test_what_is_left_out_is_the_default_of_transformers(tmp_path: Path) -> None:
    """LLaVA-1.5's configuration names neither the layers chosen nor the strategy."""
    make_checkpoint(tmp_path, "llava", tower="clip", backbone="llama", side=3, feature_layer=-2)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("vision_feature_layer", "vision_feature_select_strategy"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path)
    vision: Any = load_family("llava", tmp_path).parts(checkpoint, (42, 42)).vision
    assert (vision.chosen, vision.is_clip) == ([1], True)


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen2_vl", "vision_config", {"patch_size": [7, 7]}, "vision patches must be square"),
    ("qwen3_vl", "text_config", {"num_hidden_layers": 1}, "2 deepstack_visual_indexes, but only 1 decoder layers"),
    (
        "qwen2_vl",
        "text_config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "mrope_section .16, 24, 24. must be three",
    ),
]


@pytest.mark.parametrize(("family", "section", "settings", "message"), REFUSED, ids=[case[3][:20] for case in REFUSED])
def test_one_line_and_nothing_written(
    tmp_path: Path, family: str, section: str, settings: dict[str, Any], message: str
) -> None:
    folder = make_more(tmp_path / "checkpoint", family)
    change(folder, section, **settings)
    with pytest.raises(UserError, match=message) as error:
        export_checkpoint(folder, tmp_path / "out", camera=(56, 84))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]

"""Square towers give what those of transformers give, for real frames, in ONNX Runtime's operators and in ONNX's own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from clips import clip
from engine_runner import opened
from hf import load
from more_checkpoints import make_more
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import load_family
from edgevlm.export.vision import GRAPH, count_parameters, write_vision

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llava", {"tower": "clip", "backbone": "llama", "feature_layer": -2, "side": 6, "vision_layers": 3}),
    ("llava", {"tower": "siglip", "feature_layer": [-1, 0, 1]}),
    ("llava_next_video", {"tower": "clip", "feature_layer": [-2, -1], "side": 5}),
    ("llava_onevision", {"side": 5, "dtype": torch.bfloat16, "shard_size": "100KB"}),
    ("smolvlm", {"side": 6, "scale_factor": 3}),
]


def frames(size: tuple[int, int]) -> NDArray[np.float32]:
    """Three of bikes.mp4, a second apart: normalised float32 ``[3, 3, H, W]``."""
    with closing(open_source(None, str(clip("bikes.mp4")), SourceOptions(fps=1.0))) as source:
        images = [frame.image for frame, _ in zip(source, range(3), strict=False)]
    small = np.stack([cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA) for image in images])
    return small.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1


def of_transformers(folder: Path, family: str, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows that transformers puts in the place of a video, one after another."""
    model, tensor = load(folder, family).model, torch.from_numpy(pixels)
    with torch.no_grad():
        if family == "llava":
            rows = model.get_image_features(tensor).pooler_output
        elif family == "smolvlm":
            rows = model.get_image_features(tensor[None]).pooler_output
        else:
            rows = model.get_video_features(tensor[None]).pooler_output
    found: NDArray[np.float32] = torch.cat([row.reshape(-1, row.shape[-1]) for row in rows]).numpy()
    return found


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_features_are_those_of_transformers(tmp_path: Path, family: str, shape: dict[str, Any]) -> None:
    folder = (make_more if family == "smolvlm" else make_checkpoint)(tmp_path / "checkpoint", family, **shape)
    checkpoint = Checkpoint(folder)
    parts = load_family(family, folder).parts(checkpoint, (48, 48))
    tower, pixels = parts.vision, frames(parts.vision.size)
    wanted = of_transformers(folder, family, pixels)
    for standard in (False, True):
        write_vision(tower, checkpoint, tmp_path, standard=standard)
        session = opened(tmp_path / GRAPH)
        found = session.run(["features"], {"pixel_values": pixels})[0]
        assert found.shape == (3, tower.tokens, tower.width) == (3, parts.grid[0] * parts.grid[1], wanted.shape[1])
        rows = found.reshape(-1, tower.width)
        assert len(wanted) - len(rows) == (family == "llava_onevision")  # its newline row
        error = float(np.abs(rows - wanted[: len(rows)]).max())
        print(f"{family} {shape} standard {standard}: error {error:.1e}, deviation {wanted.std():.2f}")
        assert error < 1e-5
        assert np.abs(found[0] - found[2]).max() > 1e-4, "frames differ"
        alone = np.concatenate([session.run(["features"], {"pixel_values": pixel[None]})[0] for pixel in pixels])
        assert np.abs(alone - found).max() < 1e-5
    stored = (tmp_path / "vision.weights").stat().st_size
    assert 0 <= stored - 4 * count_parameters(tower, checkpoint) < 64 * 100

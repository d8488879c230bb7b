"""Real frames of real clips through our preparation and the processors of transformers: levels of 255, family by family.

``pil`` are its processors of pictures on Pillow, with which the families' pictures are made; ``torch`` are its processors of
videos, which resample on torch and need torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from clips import clip
from hf import patchify
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.runtime.bundle import PixelBudget, VisionSpec
from edgevlm.runtime.preprocess import Preprocessor

Float32 = NDArray[np.float32]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
NORMAL: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}
FRAMES = 4
MOST = 2.01  # levels; a first pass that rounds the other way weighs up to 1.2 in the second


def frames(name: str) -> list[NDArray[np.uint8]]:
    """FRAMES of a clip, one a second: uint8 RGB [H, W, 3]."""
    with closing(open_source(None, str(clip(name)), SourceOptions(fps=1.0))) as source:
        found = [frame.image for frame, _ in zip(source, range(FRAMES), strict=False)]
    assert len(found) == FRAMES
    return found


def of(module: str, name: str, **settings: Any) -> Any:
    return getattr(import_module(f"transformers.models.{module}"), name)(**NORMAL | settings)


@dataclass(frozen=True)
class Family:
    """``spec``: our preparation for frames of a height and width. ``pil``, ``video``: their processors."""

    spec: Callable[[int, int], dict[str, Any]]
    pil: Callable[[], Any]
    video: Callable[[], Any]
    patch: int = 0
    key: str = "pixel_values_videos"


def square(side: int, **more: Any) -> Callable[[int, int], dict[str, Any]]:
    return lambda height, width: {"size": (side, side), "fit": "stretch", **more}


def qwen(factor: int, fewest: int, most: int, clip: int) -> Callable[[int, int], dict[str, Any]]:
    return lambda height, width: {"size": PixelBudget(factor, fewest, most, clip).fitted(height, width), "fit": "stretch"}


def of_qwen(patch: int, *, module: str, video: str) -> Family:
    fewest, most, count = (128 * 28 * 28, 768 * 28 * 28, 1) if patch == 14 else (4096, 2 * FRAMES * 768 * 32 * 32, FRAMES)
    size = {"shortest_edge": fewest, "longest_edge": most}
    shape: dict[str, Any] = {"size": size, "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    pil = "qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"
    alone = shape | {"size": {"shortest_edge": fewest // count, "longest_edge": most // count}}
    return Family(
        qwen(2 * patch, fewest, most, count), lambda: of(*pil, **alone),
        lambda: of(module, video, **shape, cap_pixels_per_frame=False), patch,
    )  # fmt: skip


FAMILIES = {
    "llava": Family(
        square(336, fit="crop", shortest_edge=336),
        lambda: of("clip.image_processing_pil_clip", "CLIPImageProcessorPil", size={"shortest_edge": 336},
                   crop_size={"height": 336, "width": 336}),
        lambda: of("llava_next_video.video_processing_llava_next_video", "LlavaNextVideoVideoProcessor",
                   size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
    ),
    "llava_onevision": Family(
        square(384),
        lambda: of("siglip.image_processing_pil_siglip", "SiglipImageProcessorPil", size={"height": 384, "width": 384},
                   resample=3),
        lambda: of("llava_onevision.video_processing_llava_onevision", "LlavaOnevisionVideoProcessor"),
    ),
    "smolvlm": Family(
        square(512, fit="longest", longest_edge=2048, resample="lanczos"),
        lambda: of("smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil", size={"longest_edge": 2048},
                   max_image_size={"longest_edge": 512}, do_image_splitting=False, do_pad=False),
        lambda: of("smolvlm.video_processing_smolvlm", "SmolVLMVideoProcessor", size={"longest_edge": 2048},
                   max_image_size={"longest_edge": 512}, do_pad=False), key="pixel_values",
    ),
    "qwen2_vl": of_qwen(14, module="qwen2_vl.video_processing_qwen2_vl", video="Qwen2VLVideoProcessor"),
    "qwen3_vl": of_qwen(16, module="qwen3_vl.video_processing_qwen3_vl", video="Qwen3VLVideoProcessor"),
}  # fmt: skip


def ours(family: Family, images: list[NDArray[np.uint8]]) -> Float32:
    """Normalised pixels as the family's tower takes them, ``[F, 3, H, W]`` or patches ``[pairs, patches, n]``."""
    known: dict[str, Any] = {"shortest_edge": None, "resample": "bicubic"} | family.spec(*images[0].shape[:2])
    spec = VisionSpec(
        graph="", rescale=1 / 255, mean=tuple(MEAN), std=tuple(STD), tokens_per_frame=1, grid=(1, 1), closing=None,  # type: ignore[arg-type]
        **known,
    )  # fmt: skip
    pixels = np.stack([Preprocessor(spec)(image) for image in images])
    if not family.patch:
        return pixels
    patches, (pairs, *_) = patchify(pixels, family.patch, 2)
    return patches.numpy().reshape(pairs, -1, patches.shape[-1])


def levels(family: Family, found: Float32, theirs: Any) -> Float32:
    """Differences in levels of 255."""
    difference = np.abs(found - np.asarray(theirs, np.float32).reshape(found.shape)) * 255
    scale = np.repeat(STD, 2 * family.patch**2) if family.patch else np.array(STD)[:, None, None]
    return np.asarray(difference * scale, np.float32)


def report(kind: str, name: str, clip_name: str, difference: Float32) -> float:
    most, mean = float(difference.max()), float(difference.mean())
    assert mean < 0.05
    over = int((difference > 1.01).sum())
    print(f"{name}, {clip_name}, {kind}: {most:.2f} levels at most, {mean:.4f} on average, {over} of {difference.size} over 1")
    return most


@pytest.mark.parametrize("clip_name", ["vtest.avi", "bikes.mp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_on_pillow(name: str, clip_name: str) -> None:
    family, images = FAMILIES[name], frames(clip_name)
    found, processor = ours(family, images), FAMILIES[name].pil()
    if family.patch:  # a picture is its own pair
        twice = [image for image in images for _ in range(2)]
        found = ours(family, twice)
    theirs = [
        np.asarray(processor([[image]] if name == "smolvlm" else image, return_tensors="np")["pixel_values"])
        for image in images
    ]
    assert report("pil", name, clip_name, levels(family, found, np.stack(theirs))) <= MOST


@pytest.mark.parametrize("clip_name", ["vtest.avi", "bikes.mp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_videos_on_torch(name: str, clip_name: str) -> None:
    pytest.importorskip(
        "torchvision", reason="transformers' processors of videos resample with torchvision", exc_type=ImportError
    )
    family, images = FAMILIES[name], frames(clip_name)
    processor = family.video()
    theirs = processor(videos=[np.stack(images)], return_tensors="pt", do_sample_frames=False)[family.key]
    assert report("torch", name, clip_name, levels(family, ours(family, images), theirs)) <= MOST

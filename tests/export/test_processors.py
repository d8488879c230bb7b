"""Sizes and pixels against the processors of transformers themselves, on pictures with edges, gradients and noise.

Pixels differ by one level of 255 at most, where Pillow rounds in fixed point, as long as both resample rows before columns.
Pillow 13 takes columns first where it shrinks the height much more than the width; what is clipped between the two passes then
differs, by 24 levels on stripes and noise. Pillow before 13, and we, always take rows first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgevlm.export.vision.qwen import PatchGrid
from edgevlm.runtime.bundle import PixelBudget, VisionSpec
from edgevlm.runtime.preprocess import Preprocessor, longest, resize_bands

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.25, 0.27)


def picture(height: int, width: int) -> np.ndarray:
    random = np.random.default_rng(height * width)
    y, x = np.mgrid[:height, :width]
    image = np.stack([x * 255 / width, y * 255 / height, 255.0 * ((x // 7 + y // 5) % 2)], -1)
    return np.clip(image + random.normal(0, 20, image.shape), 0, 255).astype(np.uint8)


def spec(size: tuple[int, int], **changes: Any) -> VisionSpec:
    known: dict[str, Any] = {"fit": "stretch", "shortest_edge": None, "resample": "bicubic", "rescale": 1 / 255} | changes
    return VisionSpec(graph="", size=size, mean=MEAN, std=STD, tokens_per_frame=1, grid=(1, 1), closing=None, **known)


def levels(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Differences in levels of 255."""
    return np.abs(ours - theirs) * np.array(STD)[:, None, None] * 255


@given(
    st.integers(16, 3000),
    st.integers(16, 3000),
    st.sampled_from([(1, 3136, 12845056), (1, 100352, 602112), (2, 4096, 1572864)]),
)
def test_frames_are_as_large_as_smart_resize_makes_them(height: int, width: int, budget: tuple[int, int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_clips

    clip, fewest, most = budget
    if clip == 1 and min(height, width) >= 28:  # a side below that rounds to no patches at all in transformers
        wanted = smart_resize(height, width, 28, fewest, most)
    elif clip > 1:
        wanted = of_clips(clip, height, width, clip, 32, fewest, most)
    else:
        return
    assert PixelBudget(28 if clip == 1 else 32, fewest, most, clip).fitted(height, width) == wanted


@pytest.mark.parametrize("shape", [(480, 640), (720, 1280), (300, 300)])
@pytest.mark.parametrize(("patch", "group"), [(14, 2), (16, 2)])
def test_qwen_pixels(shape: tuple[int, int], patch: int, group: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image, budget = picture(*shape), (3136, 100352)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, temporal_patch_size=group, image_mean=list(MEAN), image_std=list(STD),
        size={"shortest_edge": budget[0], "longest_edge": budget[1]},
    )  # fmt: skip
    found = processor(image, return_tensors="np")
    size = PixelBudget(2 * patch, *budget).fitted(*shape)
    grid = PatchGrid(size[0] // patch // 2, size[1] // patch // 2, 2, patch, group)
    assert found["image_grid_thw"].tolist() == [[1, 2 * grid.rows, 2 * grid.columns]]
    pixels = Preprocessor(spec(size))(image)
    squares = np.stack([pixels] * group).reshape(group, 3, grid.rows, 2, patch, grid.columns, 2, patch)
    ours = squares.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, 3 * group * patch * patch)
    channel = np.repeat(np.array(STD), group * patch * patch)
    difference = np.abs(ours - found["pixel_values"]) * channel * 255
    print(f"{shape} to {size}: {difference.max():.2f} levels at most, {difference.mean():.4f} on average")
    assert difference.max() <= 1.01
    assert difference.mean() < 0.05


@pytest.mark.parametrize("shape", [(480, 640), (97, 131), (51, 50)])
def test_smolvlm_pixels(shape: tuple[int, int]) -> None:
    """Resized twice: up to two levels, where the rounding of the first resize is magnified."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    image = picture(*shape)
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 96}, do_image_splitting=False, do_pad=False,
        image_mean=list(MEAN), image_std=list(STD),
    )  # fmt: skip
    theirs = np.asarray(processor([[image]], return_tensors="np")["pixel_values"])[0, 0]
    ours = Preprocessor(spec((96, 96), fit="longest", longest_edge=128, resample="lanczos"))(image)
    difference = levels(ours, theirs)
    print(f"{shape} to {longest(*shape, 128)} to (96, 96): {difference.max():.2f} levels at most, {difference.mean():.4f}")
    assert difference.max() <= 2.01
    assert difference.mean() < 0.1


@pytest.mark.parametrize("shape", [(480, 640), (97, 131)])
def test_clip_and_siglip_pixels(shape: tuple[int, int]) -> None:
    """LLaVA-NeXT-Video crops CLIP's way, LLaVA-OneVision stretches SigLIP's way; one level of 255 at most."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    image, normal = picture(*shape), {"image_mean": list(MEAN), "image_std": list(STD)}
    clip = CLIPImageProcessorPil(size={"shortest_edge": 70}, crop_size={"height": 70, "width": 70}, **normal)
    siglip = SiglipImageProcessorPil(size={"height": 70, "width": 70}, resample=3, **normal)
    for processor, fit in ((clip, {"fit": "crop", "shortest_edge": 70}), (siglip, {})):
        theirs = np.asarray(processor(image, return_tensors="np")["pixel_values"])[0]
        difference = levels(Preprocessor(spec((70, 70), **fit))(image), theirs)
        print(f"{type(processor).__name__} {shape}: {difference.max():.2f} levels at most, {difference.mean():.4f}")
        assert difference.max() <= 1.01


def test_the_order_of_passes_is_all_that_differs() -> None:
    """A frame that is shrunk more in height: what Pillow makes of it, one way round or the other, whatever its version."""
    image = picture(131, 97)
    pil = np.asarray(Image.fromarray(image).resize((70, 70), Image.Resampling.BICUBIC), np.float32).transpose(2, 0, 1)
    rows, columns = np.zeros((70, 131), np.float32), np.zeros((70, 97), np.float32)
    for matrix in (rows, columns):
        for to, of, weights in resize_bands(matrix.shape[1], 70, "bicubic"):
            matrix[to, of] = weights
    planes = image.transpose(2, 0, 1).astype(np.float32)
    ways = [rounded(rows @ rounded(planes @ columns.T)), rounded(rounded(rows @ planes) @ columns.T)]
    differences = [float(np.abs(way - pil).max()) for way in ways]
    print(f"rows first {differences[0]:.0f}, columns first {differences[1]:.0f} levels")
    assert min(differences) <= 1.01
    normal = (ways[0] / 255 - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    assert levels(Preprocessor(spec((70, 70)))(image), normal).max() < 0.01


def rounded(levels: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(levels), 0, 255)

"""Pixels against Pillow, the oracle that checkpoints' image processors resize with."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import VisionSpec
from edgevlm.runtime.preprocess import Preprocessor


def spec(size, resample="bicubic", fit="stretch", shortest_edge=None):
    return VisionSpec(
        graph="vision.onnx", size=size, fit=fit, shortest_edge=shortest_edge, resample=resample, rescale=1 / 255,
        mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2), tokens_per_frame=1, grid=(1, 1), closing=None,
    )  # fmt: skip


def picture(height, width):
    """Edges, gradients and noise, uint8 RGB."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    image = np.stack([x * 255 / width, y * 255 / height, 255.0 * ((x // 7 + y // 5) % 2)], -1)
    return np.clip(image + random.normal(0, 20, image.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("method", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("shape", [(97, 131), (31, 20), (56, 200), (480, 640)])
def test_resizes_as_pillow_does(method, shape):
    image, to = picture(*shape), spec((56, 48), method)
    ours = Preprocessor(to)(image)
    pil = Image.fromarray(image).resize((48, 56), Image.Resampling[method.upper()])
    wanted = (np.asarray(pil, np.float32) / 255 - to.mean) / to.std
    levels = np.abs(ours - wanted.transpose(2, 0, 1)) * np.array(to.std)[:, None, None] * 255
    assert levels.max() <= 1.01, "one level of 255: Pillow rounds in fixed point"
    assert levels.mean() < 0.05


@pytest.mark.parametrize(("shape", "edge", "width"), [((60, 90), 30, 45), ((5, 400), 30, 2400), ((47, 70), 24, 35)])
def test_crops_the_middle(shape, edge, width):
    image, top, left = picture(*shape), (edge - 24) // 2, (width - 24) // 2
    ours = Preprocessor(spec((24, 24), fit="crop", shortest_edge=edge))(image)
    pil = Image.fromarray(image).resize((width, edge), Image.Resampling.BICUBIC)
    pil = np.asarray(pil, np.float32)[top : top + 24, left : left + 24]
    wanted = (pil / 255 - (0.5, 0.4, 0.3)) / (0.5, 0.25, 0.2)
    assert np.abs(ours - wanted.transpose(2, 0, 1)).max() < 1.01 / 255 / 0.2


@pytest.mark.parametrize("shape", [(1, 16384), (16384, 1)])
@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_a_narrow_picture_takes_little_memory(shape, fit):
    """What a resize before the crop would make of it has 2 GB."""
    prepare = Preprocessor(spec((336, 336), fit=fit, shortest_edge=336))
    tracemalloc.start()
    prepare(np.zeros((*shape, 3), np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    with pytest.raises(UserError, match="too large"):
        prepare(np.zeros((2 * shape[0], 2 * shape[1], 3), np.uint8))


def test_a_frame_of_the_right_size_is_only_normalised():
    image = picture(24, 24)
    wanted = (image.astype(np.float32) / 255 - (0.5, 0.4, 0.3)) / (0.5, 0.25, 0.2)
    assert np.allclose(Preprocessor(spec((24, 24)))(image), wanted.transpose(2, 0, 1), atol=1e-5)


@pytest.mark.parametrize("bad", [np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)])
def test_anything_else_is_refused(bad):
    with pytest.raises(UserError, match="uint8 RGB"):
        Preprocessor(spec((24, 24)))(bad)


def test_a_view_in_another_order_of_colours_is_a_frame():
    image = picture(97, 131)
    turned = np.ascontiguousarray(image[..., ::-1])[..., ::-1]
    preprocess = Preprocessor(spec((56, 48)))
    np.testing.assert_array_equal(preprocess(turned), preprocess(image))

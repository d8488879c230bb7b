"""Cells of a frame against a reference pixel by pixel, and which frames show a change."""

import numpy as np
import pytest

from edgevlm.apps.run.change_gate import CELLS, SAMPLES, THRESHOLD, ChangeGate, cell_means


def cells_slowly(image):
    """float64: the mean of each cell's picked pixels, one after the other."""
    height, width = image.shape[:2]
    rows, columns = min(CELLS, height), min(CELLS, width)
    down, across = (max(1, min(SAMPLES, size // cells)) for size, cells in ((height, rows), (width, columns)))
    means = np.zeros((rows, columns, 3))
    for row in range(rows):
        for column in range(columns):
            picked = []
            for i in range(down):
                for j in range(across):
                    y = int((row * down + i + 0.5) * height / (rows * down))
                    x = int((column * across + j + 0.5) * width / (columns * across))
                    picked.append(image[y, x].astype(float))
            means[row, column] = np.mean(picked, axis=0)
    return means


def noisy(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("shape", [(480, 640), (100, 33), (5, 7), (1, 1), (1080, 50)], ids=str)
def test_cells_are_the_means_of_their_pixels(shape):
    image = noisy(*shape)
    np.testing.assert_allclose(cell_means(image, min(CELLS, shape[0]), min(CELLS, shape[1])), cells_slowly(image), atol=1e-3)


def test_a_frame_is_compared_with_the_last_one_that_changed():
    random, (base, images) = np.random.default_rng(1), (noisy(40, 50), [])
    for _ in range(60):
        if random.random() < 0.2:
            base = np.roll(base, int(random.integers(0, 3)), axis=1)
        images.append((base // 2 + random.integers(0, 8)).astype(np.uint8))
    gate, last, expected = ChangeGate(), None, []
    for image in images:
        cells = cells_slowly(image)
        expected.append(last is None or np.abs(cells - last).max() > THRESHOLD)
        last = cells if expected[-1] else last
    assert [gate(image) for image in images] == expected
    assert 0 < sum(expected) < 60

"""Frames for tests that need no meaning in them."""

import numpy as np


def frames(count, model, seed=0):
    """Frames of the model's own size, uint8 RGB: a still picture with something moving over it."""
    random = np.random.default_rng(seed)
    height, width = model.bundle.vision.size
    still = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    for index in range(count):
        frame = still.copy()
        frame[:, (index * 5) % width :][:, :6] = random.integers(0, 256, 3, dtype=np.uint8)
        yield frame

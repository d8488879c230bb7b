"""Make the photo world's atlas, photos.jpg, from photographs in scikit-image's wheel, whose authors photos.txt names.

Run python -m train_demo.atlas FOLDER in examples/. FOLDER is skimage/data in the unpacked wheel of scikit-image 0.26.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np

from .photo_world import ATLAS, GROUND, THING

# One row per background: photograph, scale, and (left, top) of the crop for training and of the held-out crop.
GROUNDS = (
    ("brick.png", 0.6, (0, 0), (160, 160)),
    ("grass.png", 0.6, (0, 0), (160, 160)),
    ("gravel.png", 0.6, (0, 0), (160, 160)),
    ("ihc.png", 0.6, (0, 0), (160, 160)),
    ("hubble_deep_field.jpg", 0.5, (0, 0), (300, 200)),
    ("retina.jpg", 0.3, (60, 140), (200, 140)),
    ("rocket.jpg", 0.6, (0, 128), (256, 128)),
    ("astronaut.png", 0.75, (0, 0), (0, 230)),
    ("camera.png", 0.8, (0, 270), (280, 140)),
    ("coffee.png", 0.6, (0, 0), (232, 112)),
)

# One row per thing, in the order of SHAPES: photograph and box (left, top, right, bottom), in which GrabCut finds the outline.
THINGS = (
    ("astronaut.png", (360, 5, 470, 245)),  # a space shuttle
    ("coins.png", (300, 11, 370, 77)),  # a coin
    ("astronaut.png", (145, 5, 310, 200)),  # a head
    ("chelsea.png", (60, 0, 380, 300)),  # a cat's face
    ("camera.png", (75, 50, 345, 512)),  # a photographer
    ("coffee.png", (70, 10, 490, 385)),  # a cup on its saucer
    ("horse.png", (10, 5, 395, 320)),  # a horse: a drawn silhouette filled with gravel
    ("astronaut.png", (275, 335, 512, 512)),  # a helmet
)


def ground(folder: Path, name: str, scale: float, corner: tuple[int, int]) -> np.ndarray:
    picture = np.asarray(cv2.imread(str(folder / name)))
    picture = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    left, top = corner
    crop = picture[top : top + GROUND, left : left + GROUND]
    assert crop.shape[:2] == (GROUND, GROUND), (name, picture.shape)
    return crop


def thing(folder: Path, name: str, box: tuple[int, int, int, int]) -> np.ndarray:
    """Return a thing's grey levels, stretched to 0..255, and its mask: uint8 [2, THING, THING]."""
    left, top, right, bottom = box
    picture = np.asarray(cv2.imread(str(folder / name)))
    if name == "horse.png":
        mask = (picture[..., 0] < 128).astype(np.uint8)
        picture = cv2.resize(np.asarray(cv2.imread(str(folder / "gravel.png"))), picture.shape[1::-1])
    else:
        mask = np.full(picture.shape[:2], cv2.GC_BGD, np.uint8)
        cv2.setRNGSeed(0)
        models = np.zeros((1, 65)), np.zeros((1, 65))
        cv2.grabCut(picture, mask, (left, top, right - left, bottom - top), *models, 8, cv2.GC_INIT_WITH_RECT)
        mask = (mask % 2).astype(np.uint8)
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask)
    mask = (labels == 1 + stats[1:, cv2.CC_STAT_AREA].argmax()).astype(np.uint8)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    cut = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    grey, mask = cv2.cvtColor(picture, cv2.COLOR_BGR2GRAY)[cut].astype(np.float32), mask[cut]
    low, high = np.percentile(grey[mask > 0], (2, 98))
    grey = ((grey - low) / (high - low)).clip(0, 1) * 255
    height, width = mask.shape
    scale = (THING - 2) / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    out = np.zeros((2, THING, THING), np.uint8)
    at = (THING - size[1]) // 2, (THING - size[0]) // 2
    inner = slice(at[0], at[0] + size[1]), slice(at[1], at[1] + size[0])
    out[0][inner] = cv2.resize(grey, size, interpolation=cv2.INTER_AREA)
    out[1][inner] = cv2.resize(mask * np.float32(255), size, interpolation=cv2.INTER_AREA)
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    grounds = [np.hstack([ground(folder, name, scale, (a, b)[part]) for name, scale, a, b in GROUNDS]) for part in (0, 1)]
    things = np.stack([thing(folder, *row) for row in THINGS])
    band = np.zeros((THING * 2, grounds[0].shape[1], 3), np.uint8)
    for row in (0, 1):
        strip = np.concatenate(things[:, row], axis=1)
        band[row * THING : (row + 1) * THING, : strip.shape[1]] = strip[..., None]
    cv2.imwrite(str(ATLAS), np.vstack([*grounds, band]), [cv2.IMWRITE_JPEG_QUALITY, 82])


if __name__ == "__main__":
    main()

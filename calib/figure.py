"""The age profile as a picture, after HERMES's Fig. 2: layers by age, log attention as colour; as SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.calibration import Calibration

CELL, LEFT, RIGHT, TOP, BOTTOM, WIDE = 16, 40, 190, 44, 46, 640  # pixels; WIDE is all ages together
INK, PAPER = (34, 34, 34), (255, 255, 255)
COLD, WARM, HOT = (13, 8, 70), (204, 71, 120), (240, 249, 33)  # least, middle and most attention
RANGE = 1e-3  # of the largest share: what is below has the coldest colour

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: Colour


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline starts at (x, y)."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    width: int
    height: int
    boxes: list[Box]
    labels: list[Label]


def plot(calibration: Calibration, path: Path) -> None:
    """Write the figure to ``path``, ``.svg`` or ``.png``. Raises UserError."""
    check_plot(path)
    raw = WRITERS[path.suffix.lower()](draw(calibration))
    try:
        path.write_bytes(raw)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror})") from None


def check_plot(path: Path) -> None:
    """Refuse, before long work, what :func:`plot` could not write."""
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"--plot {path}: give a file that ends in {' or '.join(WRITERS)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")


def draw(calibration: Calibration) -> Drawing:
    """A row a layer, deepest on top as in a stack; the newest frame at the right."""
    layers, frames = len(calibration.ages), len(calibration.ages[0])
    shares = np.maximum(np.array(calibration.ages), 1e-12)
    most, least = float(shares.max()), max(float(shares.min()), RANGE * float(shares.max()))
    tint = np.clip(np.log(shares / least) / max(np.log(most / least), 1e-9), 0, 1)
    cell, width, height = WIDE / frames, LEFT + WIDE + RIGHT, TOP + layers * CELL + BOTTOM
    boxes, labels = (
        [],
        [Label(LEFT, 18, f"attention by age of the frame, {least:.2%} (dark) to {most:.2%} (bright), log")],
    )
    for layer in range(layers):
        y = TOP + (layers - 1 - layer) * CELL
        boxes += [Box(LEFT + (frames - 1 - age) * cell, y, cell, CELL, _colour(tint[layer, age])) for age in range(frames)]
        labels += [
            Label(12, y + CELL - 4, str(layer)),
            Label(
                LEFT + WIDE + 8, y + CELL - 4,
                f"{calibration.recency[layer]:.2f}  {calibration.periodicity[layer]:+.2f}  {calibration.classes[layer]}",
            ),
        ]  # fmt: skip
    bottom = TOP + layers * CELL
    labels += [
        Label(4, TOP - 6, "layer"),
        Label(LEFT + WIDE + 8, TOP - 6, "recency  period  class"),
        Label(LEFT, bottom + 16, f"{frames - 1} frames ago"),
        Label(LEFT + WIDE - 48, bottom + 16, "newest"),
        Label(LEFT, bottom + 34, f"measured {calibration.described}"),
    ]
    return Drawing(width, height, boxes, labels)


def _colour(level: float) -> Colour:
    low, high, part = (COLD, WARM, 2 * level) if level < 0.5 else (WARM, HOT, 2 * level - 1)
    red, green, blue = (round(a + (b - a) * float(part)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def svg(drawing: Drawing) -> bytes:
    from xml.sax.saxutils import escape

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{drawing.height}" '
        f'font-family="monospace" font-size="12" fill="rgb{INK}" shape-rendering="crispEdges">',
        f'<rect width="100%" height="100%" fill="rgb{PAPER}"/>',
    ]
    lines += [
        f'<rect x="{b.x:.2f}" y="{b.y:.2f}" width="{b.width:.2f}" height="{b.height:.2f}" fill="rgb{b.colour}"/>'
        for b in drawing.boxes
    ]
    lines += [f'<text x="{t.x:.1f}" y="{t.y:.1f}" xml:space="preserve">{escape(t.text)}</text>' for t in drawing.labels]
    return "\n".join([*lines, "</svg>", ""]).encode()


def png(drawing: Drawing) -> bytes:
    try:
        import cv2
    except ImportError:
        raise UserError("a PNG needs OpenCV: pip install 'edgevlm[cpu]', or give --plot FILE.svg") from None
    image = np.full((drawing.height, drawing.width, 3), PAPER, np.uint8)
    for box in drawing.boxes:
        x, y = math.floor(box.x), math.floor(box.y)
        image[y : math.ceil(box.y + box.height), x : math.ceil(box.x + box.width)] = box.colour
    for label in drawing.labels:
        place = (round(label.x), round(label.y))
        cv2.putText(image, label.text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.4, INK, 1, cv2.LINE_AA)
    encoded: bytes = cv2.imencode(".png", np.ascontiguousarray(image[:, :, ::-1]))[1].tobytes()
    return encoded


WRITERS: dict[str, Callable[[Drawing], bytes]] = {".svg": svg, ".png": png}

"""Charts by matplotlib: checked before long work, drawn and written after it; and the attention of layers over age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.errors import UserError
from edgevlm.packages import install
from edgevlm.runtime.calibration import Calibration

FORMATS = (".svg", ".png")
RANGE = 1e-3  # of the largest fraction: what is below has the darkest colour


def check_plot(path: Path) -> None:
    """Raise UserError, before long work, for a chart that could not be written to ``path``."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--plot {path}: give a file that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, inches. Raises UserError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--plot needs matplotlib: {install('report')}") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure. Raises UserError."""
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None, dpi=120)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror})") from None


def plot_ages(calibration: Calibration, path: Path) -> None:
    """Attention by age of the frame, after HERMES's Fig. 2: layers up, the newest frame at the right, log colours."""
    fractions = np.maximum(np.array(calibration.ages), 1e-12)  # (layer, frame), newest first
    most = float(fractions.max())
    least = min(max(float(fractions.min()), RANGE * most), most * (1 - 1e-6))
    layers, frames = fractions.shape
    figure = new_figure(10, 1.6 + 0.22 * layers)
    axes = figure.subplots()
    brightness = np.log10(np.maximum(fractions, least)[:, ::-1])
    mesh = axes.pcolormesh(np.arange(frames, -1, -1) - 0.5, np.arange(layers + 1), brightness)
    rows = zip(calibration.recency, calibration.periodicity, calibration.classes, strict=True)
    classes = [
        f"{layer}  {name}, recency {recent:.2f}, period {period:+.2f}" for layer, (recent, period, name) in enumerate(rows)
    ]
    axes.set_yticks(np.arange(layers) + 0.5, classes)
    axes.invert_xaxis()
    axes.set_xlabel(f"frames ago; measured {calibration.described}", parse_math=False)
    axes.set_title("attention by age of the frame")
    figure.colorbar(mesh, label="log10 of the fraction")
    save_figure(figure, path)

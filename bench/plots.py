"""Charts by matplotlib: checked before long work, drawn and written after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.packages import install

FORMATS = (".svg", ".png")


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

"""Export checkpoints to bundles."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import checkpoint_folder
from edgevlm.export.options import ExportOptions
from edgevlm.packages import needs
from edgevlm.progress import Notify

__all__ = ["ExportOptions", "export_checkpoint"]


def export_checkpoint(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    *,
    progress: Notify = lambda _: None,
    notify: Notify | None = None,
    force: bool = False,
    **options: Any,
) -> Path:
    """Export a Hugging Face checkpoint folder to a bundle in ``out_dir`` and return the bundle's path.

    ``progress(what)`` is called for each step, ``notify(line)`` when an interrupted export resumes. With ``force``, the
    complete new bundle replaces an existing bundle. ``options`` are fields of :class:`ExportOptions`. Raises a one-line
    UserError if the checkpoint is damaged or of an unknown kind, or if the disk is full.
    """
    folder, chosen = checkpoint_folder(checkpoint_dir), ExportOptions(**options)
    try:
        with needs("exporting"):
            writer: Any = import_module("edgevlm.export.writer")
            path: Path = writer.write_bundle(folder, Path(out_dir), chosen, progress, notify or (lambda _: None), force=force)
    except MemoryError:
        raise UserError(f"{folder}: not enough free memory to export; stop other programs") from None
    return path

"""Check the disk and the memory that an export takes before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from edgevlm.errors import UserError

WORKING = 1 << 30  # bytes that an export may take beside its largest layer


def needed_memory(layer: int) -> int:
    """Bytes that must be free for an export whose largest layer takes ``layer`` as it is read."""
    return layer + WORKING // 2


def check_room(checkpoint: Path, target: Path, folder: Path, layer: int, bundle: int) -> None:
    """Raise UserError without the memory for a layer, or the disk of ``folder`` for a bundle less what is there, in bytes."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(folder).free
    if memory < (needed := needed_memory(layer)):
        raise UserError(
            f"{checkpoint}: exporting it takes {needed / 1e9:.1f} GB of memory and {memory / 1e9:.1f} GB are available; "
            "end other programs"
        )
    if disk < bundle - sum(path.stat().st_size for path in folder.iterdir()):
        raise UserError(
            f"{target}: the bundle takes {bundle / 1e9:.1f} GB and its disk has {disk / 1e9:.1f} GB free; choose another --out"
        )

"""Check the disk and the memory that an export takes before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from edgevlm.errors import UserError

if TYPE_CHECKING:  # a plan asks this module too, and needs none of them
    from edgevlm.export.backbones import DecoderShape
    from edgevlm.export.precisions import Layouts

FLOAT = 4  # bytes of a weight of the tower, and of any that is being read
WORKING = 1 << 30  # bytes that an export may take beside its largest layer


def layer_bytes(shape: DecoderShape) -> int:
    """The weights of one decoder layer as they are read, float32; no other part is held whole."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return FLOAT * (attention + 3 * shape.hidden * shape.intermediate)


def bundle_bytes(shape: DecoderShape, tower: int, layouts: Layouts) -> int:
    """About what a bundle takes on the disk, of a tower of ``tower`` numbers."""
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    layers = layer_bytes(shape) // FLOAT * shape.layers
    return int(layers * layouts.matrices.bytes_per_weight() + tables * layouts.table.bytes_per_weight() + FLOAT * tower)


def check_disk(target: Path, folder: Path, needed: int) -> None:
    """Raise UserError if the disk of ``folder`` has not ``needed`` bytes, less what lies in it already, for ``target``."""
    free = shutil.disk_usage(folder).free
    if free < needed - sum(path.stat().st_size for path in folder.iterdir()):
        raise UserError(f"{target}: the bundle takes {_size(needed)} and its disk has {_size(free)} free; choose another --out")


def needed_memory(layer: int) -> int:
    """Bytes that must be free for an export whose largest layer takes ``layer`` as it is read."""
    return layer + WORKING // 2


def check_memory(checkpoint: Path, layer: int) -> None:
    """Raise UserError if there is not the memory to hold a layer of ``layer`` bytes and what an export works with."""
    needed, free = needed_memory(layer), psutil.virtual_memory().available
    if free < needed:
        raise UserError(
            f"{checkpoint}: exporting it takes {_size(needed)} of memory and {_size(free)} are available; end other programs"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"

"""Encode only what changed: which patches of a frame differ from the pixels that they were last encoded from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgevlm.errors import UserError, nearest
from edgevlm.runtime.changes import ALL, AUTO, CHANGED

INTERVAL = 64
THRESHOLD = 6.0


@dataclass(frozen=True, slots=True)
class EncodeChanged:
    """interval: the whole frame is encoded every so many frames. threshold: levels of 255 by which the tenth of a patch's
    pixels that differ most must differ on average; 0 encodes every frame whole."""

    interval: int = INTERVAL
    threshold: float = THRESHOLD

    def __str__(self) -> str:
        return f"{CHANGED}:interval={self.interval},threshold={self.threshold:g}"


@dataclass(frozen=True, slots=True)
class EncodeSetting:
    """``--encode`` as typed: ``auto``, ``all``, or ``changed`` with its settings."""

    name: str = AUTO
    changed: EncodeChanged = EncodeChanged()


def parse_encode(text: str) -> EncodeSetting:
    """``auto``, ``all`` or ``changed[:interval=K,threshold=T]``. Raises UserError for anything else."""
    name, _, settings = text.partition(":")
    if name not in (AUTO, ALL, CHANGED):
        raise UserError(f"encode {text!r}: {nearest(name, [AUTO, ALL, CHANGED])}")
    if name != CHANGED and settings:
        raise UserError(f"encode {text!r}: {name} has no settings")
    values: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        match = re.fullmatch(r"(interval)=(\d{1,9})|(threshold)=(\d{1,3}(?:\.\d*)?|\.\d+)", setting)
        if not match:
            raise UserError(f"encode {text!r}: give changed:interval={INTERVAL},threshold={THRESHOLD:g}")
        values[match[1] or match[3]] = match[2] or match[4]
    changed = EncodeChanged(int(values.get("interval", INTERVAL)), float(values.get("threshold", THRESHOLD)))
    if changed.interval < 1 or changed.threshold > 255:
        raise UserError(f"encode {text!r}: interval is 1 or more frames, threshold 0 to 255 levels")
    return EncodeSetting(name, changed)

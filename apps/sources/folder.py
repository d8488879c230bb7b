"""A folder of pictures as a stream, in natural order: img2 comes before img10."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Recording, StageTimer
from edgevlm.apps.sources.opencv import decode_picture
from edgevlm.errors import SourceError

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class FolderSource(Recording):
    """``rate``: pictures a second, ``fps`` unless given, so that each is taken. A damaged one takes its time and is counted."""

    def __init__(self, folder: str | Path, fps: float | None, rate: float | None = None) -> None:
        super().__init__(Path(folder).name, fps)
        self._folder = Path(folder)
        self._paths = pictures_in(self._folder)
        self._rate = rate or fps or 1.0
        self._next = 0

    @property
    def end_s(self) -> float:
        """Where the pictures taken or passed over so far end, seconds."""
        return self._next / self._rate

    def _advance(self) -> float | None:
        if self._next == len(self._paths):
            return None
        self._next += 1
        return (self._next - 1) / self._rate

    def _picture(self, timer: StageTimer) -> NDArray[np.uint8] | None:
        try:
            data = self._paths[self._next - 1].read_bytes()
        except OSError:
            data = b""
        timer.captured()
        image = decode_picture(data)
        timer.mark("decode")
        return image

    def _check_end(self) -> None:
        if not self.given:
            raise SourceError(f"{self._folder}: none of its {self._next} pictures can be read; they are damaged")


def pictures_in(folder: Path) -> list[Path]:
    """List its pictures, by suffix, in natural order. Raises SourceError where there is none, or it may not be read."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read ({error.strerror})") from None
    chosen = sorted((name for name in names if Path(name).suffix.lower() in SUFFIXES), key=natural)
    if not chosen:
        raise SourceError(
            f"{folder}: is a folder without pictures ({', '.join(sorted(SUFFIXES))}); give a folder of pictures or a video file"
        )
    return [folder / name for name in chosen]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key: digits compare as the number they are, other characters without regard to case."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts]

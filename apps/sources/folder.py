"""A folder of pictures as a stream, in natural order: img2 comes before img10."""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgevlm.apps.sources.base import Frame, FrameSampler, Source, StageTimer, State
from edgevlm.apps.sources.opencv import decode_picture
from edgevlm.errors import SourceError

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class FolderSource(Source):
    """``rate``: pictures a second, ``fps`` unless given, so that each is taken. A damaged one takes its time and is counted."""

    def __init__(self, folder: str | Path, fps: float | None, rate: float | None = None) -> None:
        self.name = Path(folder).name
        self._folder = Path(folder)
        self._paths = pictures_in(self._folder)
        self._sampler = FrameSampler(fps)
        self._rate = rate or fps or 1.0
        self._next = self._given = 0

    @property
    def end_s(self) -> float:
        """Where the pictures taken or passed over so far end, seconds."""
        return self._next / self._rate

    def read(self) -> Frame | None:
        while self._next < len(self._paths) and self.state is not State.ENDED:
            self.state = State.RUNNING
            path, time_s = self._paths[self._next], self._next / self._rate
            self._next += 1
            if not self._sampler.wants(time_s):
                continue
            timer = StageTimer()
            try:
                data = path.read_bytes()
            except OSError:
                data = b""
            timer.captured()
            image = decode_picture(data)
            timer.mark("decode")
            if image is not None:
                self._given += 1
                return Frame(image, time_s, timer=timer)
            self.drops["corrupt"] += 1
        if not self._given and self.state is not State.ENDED:
            self.state = State.FAILED
            raise SourceError(f"{self._folder}: none of its {self._next} pictures can be read; they are damaged")
        self.close()
        return None


def pictures_in(folder: Path) -> list[Path]:
    """Its pictures, by suffix, in natural order. Raises SourceError where there is none, or the folder may not be read."""
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
    """A key to sort by: digits compare as the number they are, other characters without regard to case."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.casefold()) for part in parts]

"""A data folder as it was downloaded: annotation files, videos, the questions they hold, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from edgevlm.bench.suites.fields import Malformed, reason_of, shown
from edgevlm.errors import UserError

GUIDE = "docs/internals/published-benchmarks.md"  # says where data is had
FOLDERS = ("", "videos", "video", "data")  # where videos are looked for under the data folder
SUFFIXES = ("", ".mp4", ".mkv", ".webm", ".avi", ".mov")


@dataclass(frozen=True, slots=True)
class Poll:
    """A question that waits for its moment: ``prompt`` is asked each second until it is answered yes.

    until_s: the last second it is asked at; due_s: the moment itself. Seconds of the video.
    """

    prompt: str
    until_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class SuiteQuestion:
    """One question about one video.

    id: file and place, unique in the suite. video: path of a file inside the data folder. prompt: what the model is asked,
    whole. answer: what is right. options: texts of a multiple choice, without letters, or labels that the nearest is taken
    of. time_s: asked when the stream reaches it, and nothing later is seen; None: at the end. clip: (start, end), all of the
    video that is shown; None: from its beginning. scoring: a name of :data:`edgevlm.bench.suites.scoring.SCORINGS`. tokens:
    of an answer at most.
    """

    id: str
    video: str
    text: str
    prompt: str
    answer: str
    scoring: str
    subtask: str
    category: str = ""
    options: tuple[str, ...] = ()
    time_s: float | None = None
    clip: tuple[float, float] | None = None
    poll: Poll | None = None
    tokens: int = 16

    @property
    def due_s(self) -> float | None:
        """When it is asked first, seconds of the video; None: at the video's end."""
        return self.time_s if self.time_s is not None or self.clip is None else self.clip[1]


Make = Callable[[Any, str], Iterable[SuiteQuestion]]


@dataclass(frozen=True, slots=True)
class MalformedRecord:
    """A record that was left out. place: its index in the file, from 0; that of a nested one after a slash."""

    file: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, record {self.place}: {self.reason}"


@dataclass(slots=True)
class Dataset:
    """``findings``: records left out; ``missing``: videos that are not there, relative to ``root``."""

    root: Path
    findings: list[MalformedRecord] = field(default_factory=list)
    missing: dict[str, None] = field(default_factory=dict)

    def files(self, *names: str) -> list[str]:
        """Those of ``names``, glob patterns relative to the folder, that are there, in order, each once.

        Raises UserError where none is, naming what is expected.
        """
        found = [path for name in names for path in sorted(self.root.glob(name)) if path.is_file()]
        if not found:
            raise UserError(f"--data {self.root}: has no {' or '.join(names)}; download the annotations there ({GUIDE})")
        return list(dict.fromkeys(path.relative_to(self.root).as_posix() for path in found))

    def read(self, name: str) -> Any:
        """The JSON that a file holds. Raises UserError, one line."""
        path = self.root / name
        try:
            return json.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise UserError(f"{path}: is damaged or another kind of file ({why}); download it again") from None

    def each(self, file: str, values: Any, make: Make, within: str = "") -> Iterator[SuiteQuestion]:
        """The questions of each record of a list; a malformed record is noted and left out, whole.

        make: from a record and its place to its questions; raises Malformed. within: the place of the list itself.
        """
        if not isinstance(values, list):
            self.note(file, within or "-", "is not a list of records")
            return
        for index, value in enumerate(values):
            place = f"{within}{index}"
            try:
                made = list(make(value, place))
            except ValueError as error:  # Malformed, or pydantic's
                self.note(file, place, reason_of(error))
            else:
                yield from made

    def note(self, file: str, place: str, reason: str) -> None:
        self.findings.append(MalformedRecord(file, place, reason))

    def video(self, named: str, *folders: str) -> str:
        """The video that a record names, relative to ``root``; noted as missing where it is not there.

        It is looked for in ``folders`` and :data:`FOLDERS`, with and without the usual suffixes. Raises Malformed for a path
        that leads out of the data folder; links there are its owner's and followed.
        """
        path = PurePosixPath(named.replace("\\", "/"))
        leaves = path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", named)
        if leaves or not path.parts or not named.isprintable():
            raise Malformed(f"the video {shown(named)} lies outside of the data folder")
        tried = [
            PurePosixPath(folder, name)
            for name in dict.fromkeys((path, PurePosixPath(path.name)))
            for folder in dict.fromkeys((*folders, *FOLDERS))
        ]
        for base in tried:
            for suffix in SUFFIXES:
                candidate = base.as_posix() + suffix
                if _exists(self.root / candidate):
                    return candidate
        self.missing.setdefault(tried[0].as_posix())
        return tried[0].as_posix()


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False

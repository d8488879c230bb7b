"""Read a downloaded data folder: its annotation files, questions and videos."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, create_model

from edgevlm.bench.output import printable
from edgevlm.bench.suites import GUIDE
from edgevlm.errors import UserError

FOLDERS = ("", "videos", "video", "data")  # folders in the data folder that may hold videos
SUFFIXES = ("", ".mp4", ".mkv", ".webm", ".avi", ".mov")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def seconds_of(value: Any) -> float:
    """Convert ``HH:MM:SS``, ``MM:SS`` or a number of seconds to seconds. Raises ValueError."""
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    if not re.fullmatch(r"\d{1,7}(:\d{1,2}){0,2}(\.\d+)?", text):
        raise ValueError("is not a time such as 90, 1:30 or 0:01:30")
    return sum(float(part) * 60**place for place, part in enumerate(reversed(text.split(":"))))


def _options_of(value: Any) -> list[Any]:
    if not isinstance(value, list) or not 2 <= len(value) <= len(LETTERS):
        raise ValueError("is not a list of 2 to 26 options")
    texts = [str(each).strip() if isinstance(each, str | int | float) else each for each in value]
    lettered = zip(LETTERS, texts, strict=False)
    return [re.sub(rf"^\(?{letter}[.):]\s*", "", text) or text if isinstance(text, str) else text for letter, text in lettered]


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=20_000)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Seconds = Annotated[float, BeforeValidator(seconds_of)]
Options = Annotated[tuple[Text, ...], BeforeValidator(_options_of)]


def reader(**fields: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads certain fields from a record and raises ValueError if a field is invalid.

    ``fields``: each field's name and type.
    """
    kinds: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    model = create_model("Record", **kinds)
    return lambda value: model.model_validate(value).__dict__


@dataclass(frozen=True, slots=True)
class Poll:
    """A prompt that is repeated every second until the answer is yes.

    ``until_s``: when to stop asking, in seconds of the video. ``due_s``: when the answer should become yes.
    """

    prompt: str
    until_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class SuiteQuestion:
    """One question about one video.

    ``id``: the record's file and index, unique in the suite. ``video``: the file's path in the data folder. ``options``: the
    texts of the choices, without their letters. ``time_s``: when to ask, or to start polling, in seconds of the video.
    ``tokens``: the maximum length of the answer, in tokens. ``scoring``: a key of
    :data:`edgevlm.bench.suites.scoring.SCORINGS`.
    """

    id: str
    video: str
    text: str
    prompt: str
    answer: str
    scoring: str
    subtask: str
    category: str
    time_s: float
    options: tuple[str, ...] = ()
    poll: Poll | None = None
    tokens: int = 16


@dataclass(slots=True)
class Dataset:
    """A suite's data. ``findings``: each skipped record's file, index and reason. ``missing``: absent videos."""

    root: Path
    findings: list[dict[str, str]] = field(default_factory=list)
    missing: dict[str, None] = field(default_factory=dict)

    def files(self, *patterns: str) -> list[str]:
        """Return the paths, relative to the folder, of files that match any pattern. Raises UserError if no file matches."""
        found = [path for pattern in patterns for path in sorted(self.root.glob(pattern)) if path.is_file()]
        if not found:
            raise UserError(
                f"--data {self.root}: {' or '.join(patterns)} not found; download the annotations to this folder ({GUIDE})"
            )
        return list(dict.fromkeys(path.relative_to(self.root).as_posix() for path in found))

    def read(self, name: str) -> Any:
        """Read and parse a JSON file. Raises UserError."""
        path = self.root / name
        try:
            return json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0][:120]
            raise UserError(f"{path}: is damaged or not a JSON file ({why}); download it again") from None

    def questions(
        self, file: str, values: Any, make: Callable[[Any, str], Iterable[SuiteQuestion]], nested: str = ""
    ) -> Iterator[SuiteQuestion]:
        """Yield each record's questions. Invalid records are skipped and added to ``findings``.

        If a record has a list under the key ``nested``, each entry of the list is a record and also gets the outer record's
        fields. ``make``: a function that makes questions from a record and its id, or raises ValueError.
        """
        for place, value in _leaves(values, nested, ""):
            try:
                yield from list(make(value, f"{file}:{place}"))
            except ValueError as error:
                self.findings.append({"file": file, "record": place or "-", "reason": _reason_of(error)})

    def video(self, named: str, *folders: str) -> str:
        """Find a video in ``folders`` or FOLDERS; return its path relative to ``root``. Add an absent video to ``missing``.

        Raises ValueError for a path that leads out of the data folder; symbolic links are followed.
        """
        path = PurePosixPath(named.replace("\\", "/"))
        leaves = path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", named)
        if leaves or not path.parts or not named.isprintable():
            raise ValueError(f"video {named} is outside the data folder")
        tried = [PurePosixPath(folder, name).as_posix() for name in (path, path.name) for folder in (*folders, *FOLDERS)]
        for video in (name + suffix for name in tried for suffix in SUFFIXES):
            if os.path.isfile(self.root / video):
                return video
        self.missing[tried[0]] = None
        return tried[0]


def _leaves(value: Any, nested: str, place: str) -> Iterator[tuple[str, Any]]:
    parent: dict[str, Any] = {}
    if isinstance(value, dict) and isinstance(value.get(nested), list) and value[nested]:
        parent = {name: each for name, each in value.items() if name != nested}
        value = value[nested]
    if not isinstance(value, list) or (place and not value):
        yield place, value
        return
    for index, each in enumerate(value):
        merged = {**parent, **each} if isinstance(each, dict) else each
        yield from _leaves(merged, nested, f"{place}/{index}" if place else str(index))


def _reason_of(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return printable(str(error))
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return printable(f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": "))

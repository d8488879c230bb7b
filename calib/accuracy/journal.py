"""The journal of a run: a JSON line for each piece of work, appended as it is done, so that a stopped run can be resumed.

The first line names what makes results comparable; a run whose header differs is refused. A line that a kill cut short is
dropped and its work done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.runtime.jsonlines import LineWriter, read_lines

Key = tuple[Hashable, ...]
Record = dict[str, Any]


def key_of(record: Mapping[str, Any]) -> Key:
    """Policy, budget and stream."""
    return record["policy"], record["budget"], record["stream"]


class RunJournal:
    """Records by key, in memory and, given a path, in a file. One process writes it."""

    def __init__(
        self,
        path: Path | None,
        header: Mapping[str, object],
        resume: bool = False,
        key: Callable[[Mapping[str, Any]], Key] = key_of,
    ) -> None:
        """key: of a record; raises KeyError if it is invalid.

        Raises UserError for a file that is there without ``resume``, or is of other settings.
        """
        self.records: dict[Key, Record] = {}
        self._key = key
        self._file: LineWriter | None = None
        if path is None:
            return
        first = {"journal": "edgevlm bench accuracy", **header}
        try:
            if path.exists() and path.stat().st_size:
                if not resume:
                    raise UserError(f"--out {path}: is there already; add --resume to continue it, or name another file")
                self._read(path, first)
            self._file = LineWriter(path)
            if not path.stat().st_size:
                self._file.append(first)
        except OSError as error:
            raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None

    def _read(self, path: Path, wanted: Record) -> None:
        """Take the records. Raises UserError."""
        if (json.dumps(wanted, ensure_ascii=False) + "\n").encode().startswith(path.read_bytes()):
            return  # nothing but the header, or a part of it
        try:
            lines = read_lines(path)
            found = lines[0] if lines else {}
            if found.get("journal") != wanted["journal"]:
                raise ValueError
            self.records = {self._key(record): record for record in lines[1:]}
        except (ValueError, KeyError, AttributeError):
            raise UserError(f"--out {path}: is not a journal of {wanted['journal']}; name another file") from None
        other = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        if other:
            differences = ", ".join(f"{name} {found.get(name)} there, {wanted.get(name)} now" for name in other)
            raise UserError(f"--out {path}: was made with other settings ({differences}); name another file")

    def add(self, record: Record) -> None:
        """Append one record, on disk before this returns."""
        self.records[self._key(record)] = record
        if self._file is not None:
            self._file.append(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

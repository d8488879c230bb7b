"""The journal of a run: a JSON line for each piece of work, appended as it is done, so that a stopped run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

from edgevlm.runtime.files import JsonLines

Key = tuple[Hashable, ...]
Record = dict[str, Any]


def key_of(record: Mapping[str, Any]) -> Key:
    """Policy, budget and stream."""
    return record["policy"], record["budget"], record["stream"]


class RunJournal(JsonLines):
    """Records by key; ``header`` names what makes them comparable."""

    def __init__(
        self,
        path: Path | None,
        header: Mapping[str, object],
        resume: bool = False,
        key: Callable[[Mapping[str, Any]], Key] = key_of,
    ) -> None:
        super().__init__(path, {"journal": "edgevlm bench accuracy", **header}, key, resume=resume)

"""What an export has finished, one JSON line a step: after a kill the same export goes on behind the last of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgevlm.runtime.jsonlines import LineWriter, read_lines


class Journal:
    """Steps in the order in which they were finished, each with a JSON value; kept in ``path``, or nowhere.

    A last line that a kill cut short is as if it had not been written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else LineWriter(path, sync=True)
        lines = [] if path is None else read_lines(path)
        self._steps: dict[str, tuple[str, Any]] = {step: (group, value) for step, group, value in lines}

    def __len__(self) -> int:
        return len(self._steps)

    def has(self, step: str) -> bool:
        return step in self._steps

    def values(self, group: str) -> list[Any]:
        """The values of the steps that belong to ``group``."""
        return [value for owner, value in self._steps.values() if owner == group]

    def once(self, step: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returned, a JSON value, when the step was done: it is called only if it was not."""
        if step not in self._steps:
            self.finish(step, work())
        return self._steps[step][1]

    def finish(self, step: str, value: Any, group: str = "") -> None:
        """Note a step; the files that it wrote lie on the disk already. Raises OSError."""
        self._steps[step] = (group, value)
        if self._file is not None:
            self._file.append([step, group, value])

"""Tables of README made from results: what stands between ``<!-- bench: NAME -->`` and ``<!-- /bench -->``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from edgevlm.bench.results.journal import Run
from edgevlm.bench.results.tables import TABLES
from edgevlm.errors import UserError

MARKED = re.compile(r"(<!-- bench: ([\w-]+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)


def rewrite(path: Path, runs: Sequence[Run]) -> list[str]:
    """Make the marked tables of the file anew; returns their names. Raises UserError for a name or lines that are not there."""
    try:
        text = path.read_text(encoding="utf-8")
        made = filled(text, runs)
        if made != text:
            path.write_text(made, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--readme {path}: cannot be read or written ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--readme {path}: is not UTF-8") from None
    return [found[1] for found in MARKED.findall(text)]


def filled(text: str, runs: Sequence[Run]) -> str:
    """The text with each marked table made from the lines of the last run that has some for it."""

    def table(found: re.Match[str]) -> str:
        name = found[2]
        if name not in TABLES:
            raise UserError(f"<!-- bench: {name} -->: there is no such table; there is {', '.join(TABLES)}")
        rows = next((rows for run in reversed(runs) if len(rows := TABLES[name](run.lines)) > 2), None)
        if rows is None:
            raise UserError(f"<!-- bench: {name} -->: the results have no lines for this table")
        return found[1] + "\n".join(rows) + "\n" + found[4]

    return MARKED.sub(table, text)

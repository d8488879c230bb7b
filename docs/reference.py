"""Reference pages made from the code: the command line and the Python names when the site is built, the JSON lines by

    python docs/reference.py

which writes reference/json.md; a test checks that it is current.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import edgevlm
from edgevlm.apps.commands.lazy import load_command


def on_files(files: Any, config: Any) -> Any:
    """A hook of mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for name, page in (("cli", cli()), ("python", python())):
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def cli() -> str:
    """Every command and option, as ``--help`` has them."""
    import typer

    from edgevlm.cli import app

    return "# Command line\n\n" + "\n".join(_command("edgevlm", typer.main.get_command(app)))


def _command(path: str, command: Any) -> Iterator[str]:
    yield f"## `{path}`\n\n{inspect.cleandoc(command.help or '')}\n"
    rows = [
        (", ".join(option.opts) if option.opts[0].startswith("-") else f"`{option.name.upper()}`", option)
        for option in command.params
        if option.name != "help" and not getattr(option, "hidden", False)
    ]
    if rows:
        yield "| option | | variable |\n|---|---|---|"
        for name, option in rows:
            said = _one_line(getattr(option, "help", "") or "")
            variable = option.envvar if isinstance(option.envvar, str) else ""
            if not variable and name.startswith("--") and " " in path:
                variable = f"{path} {option.name}".upper().replace(" ", "_").replace("-", "_")
            yield f"| `{name}` {_one_line(option.metavar or '')} | {said} | {f'`{variable}`' if variable else ''} |"
        yield ""
    targets = getattr(command, "targets", {})
    for name, child in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", load_command(name, targets[name]) if name in targets else child)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def python() -> str:
    """The public names of the package and what each has."""
    parts = ["# Python\n"]
    for name in edgevlm.__all__:
        thing = getattr(edgevlm, name)
        if not inspect.isclass(thing):
            continue
        parts.append(f"## `{name}`\n\n{_plain(thing)}\n")
        for member, value in inspect.getmembers(thing):
            if (
                member.startswith("_")
                or not (inspect.isroutine(value) or isinstance(value, property))
                or not inspect.getdoc(value)
            ):
                continue
            if member in dir(Exception) and issubclass(thing, Exception):
                continue
            signature = str(inspect.signature(value)) if inspect.isroutine(value) else ""
            parts.append(f"### `{name}.{member}`\n")
            if signature:
                parts.append(f"```python\n{member}{signature}\n```\n")
            parts.append(f"{_plain(value)}\n")
    return "\n".join(parts)


def _plain(thing: Any) -> str:
    """A docstring as Markdown: no roles, single backticks."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.getdoc(thing) or "").replace("``", "`")


def json_lines() -> str:
    """Every field of every line that ``--json`` prints."""
    from edgevlm.apps.schemas import LINES
    from edgevlm.bench.schemas import FIELDS

    parts = [JSON_INTRO]
    for command, kinds in LINES.items():
        parts.append(f"## `edgevlm {command} --json`\n")
        for kind, fields in kinds.items():
            parts += [f"### `{kind}`\n", _table(fields)]
    return "\n".join([*parts, JSON_BENCH, _table(FIELDS)])


JSON_INTRO = """# JSON

With `--json` a command prints one object per line on stdout. `event` says what a line is, or `bench` which measurement;
`schema` is the version of these tables, 1 today. Later versions may add fields, so ignore those you do not know. A field
marked `?` may be missing. As JSON Schema (2020-12) the same is in Python: `edgevlm.apps.schemas.SCHEMAS` by `event`, and
`edgevlm.bench.schemas.bench_schema()`.
"""
JSON_BENCH = """## `edgevlm bench .. --json`

Every measurement prints some of these fields. Times are milliseconds, `mb` is 10^6 bytes, and null is not measured.
"""


def _table(fields: Any) -> str:
    rows = (f"| `{name}` | {kind.replace('|', ' or ')} | {text} |" for name, (kind, text) in fields.items())
    return "\n".join(["| field | type | |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    folder = Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    (folder / "json.md").write_text(json_lines())

"""Reference pages made from the code when the site is built: the command line, the Python names, the JSON lines."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import edgevlm
from edgevlm.apps.commands.lazy import load_command


def on_files(files: Any, config: Any) -> Any:
    """A hook of mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for name, page in (("cli", cli()), ("python", python()), ("json", json_lines())):
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
    """The schema of every line that ``edgevlm run --json`` prints."""
    from edgevlm.apps.run import events

    parts = ["# JSON\n\n`--json` prints one object a line on stdout. Every kind of line has a schema (JSON Schema 2020-12).\n"]
    for name, schema in getattr(events, "SCHEMAS", {}).items():
        parts.append(f"## `{name}`\n\n```json\n{json.dumps(schema, indent=2)}\n```\n")
    return "\n".join(parts)

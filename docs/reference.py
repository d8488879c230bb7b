"""Make the reference pages from the code, and the report from the results.

``python docs/reference.py`` writes reference/json.md and reference/http.md; tests check that they are current. The command
line, the Python names and the report are made when mkdocs builds the site.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import edgevlm
    import edgevlm.extend
    from edgevlm.apps.commands.lazy import load_command
except ImportError as error:
    raise SystemExit(f"the docs are made from the installed package: pip install -e '.[docs]' in the clone ({error})") from None


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Rank the reference below the guide in the site's search."""
    if page.url.startswith("reference/"):
        page.meta["search"] = {"boost": 0.3}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    from edgevlm.bench.results import report
    from edgevlm.bench.results.journal import read_runs

    for name, page in (("cli", cli()), ("python", python())):
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    results = report.page(read_runs([str(Path(__file__).with_name("results.jsonl"))]))
    files.append(File.generated(config, "report.html", content=results))
    return files


def cli() -> str:
    """Return the page of all commands and options, with their help texts."""
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
    """Return the page of the package's public classes and their members."""
    parts = ["# Python\n"]
    for name, thing in [(name, getattr(of, name)) for of in (edgevlm, edgevlm.extend) for name in of.__all__]:
        if not inspect.isclass(thing):
            continue
        place = "" if name in edgevlm.__all__ else "extend."
        parts.append(f"## `edgevlm.{place}{name}`\n\n{_plain(thing)}\n")
        for member, value in inspect.getmembers(thing):
            if (
                member.startswith("_")
                or not (inspect.isroutine(value) or isinstance(value, property))
                or not inspect.getdoc(value)
            ):
                continue
            if member in dir(Exception) and issubclass(thing, Exception):
                continue
            signature = str(inspect.signature(value)) if inspect.isroutine(value) and callable(value) else ""
            parts.append(f"### `{name}.{member}`\n")
            if signature:
                parts.append(f"```python\n{member}{signature}\n```\n")
            parts.append(f"{_plain(value)}\n")
    return "\n".join(parts)


def _plain(thing: Any) -> str:
    """Return a docstring as Markdown: without roles, with single backticks and one colon before code."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.getdoc(thing) or "").replace("``", "`").replace("::\n", ":\n")


def json_lines() -> str:
    """Return the page of every field that ``--json`` prints."""
    from edgevlm.apps.schemas import LINES, Moment, kind_of
    from edgevlm.bench.schemas import Bench

    parts = [JSON_INTRO]
    for command, models in LINES.items():
        parts.append(f"## `edgevlm {command} --json`\n")
        for model in models:
            parts += [f"### `{kind_of(model)}`\n", _fields(model.model_json_schema())]
    return "\n".join(
        [*parts, "## Moment\n", _fields(Moment.model_json_schema()), JSON_BENCH, _fields(Bench.model_json_schema())]
    )


JSON_INTRO = """# JSON

With `--json` a command prints one object per line on stdout. The field `event` names the kind of line; a measurement has the
field `bench` instead. `schema` is the version of these tables, currently 1. Later versions may add fields, so ignore fields
that you do not know. An optional field may be missing. In Python, `edgevlm.apps.schemas.schemas()` returns a JSON Schema
(2020-12) for each `event`, and `edgevlm.bench.schemas.bench_schema()` the schema of measurements.
"""
JSON_BENCH = """## `edgevlm bench .. --json`

Every measurement prints some of these fields. Times are in milliseconds, `mb` is 10^6 bytes, and null means not measured.
"""


def http() -> str:
    """Return the page of the routes of ``edgevlm serve``, made from its OpenAPI description."""
    from edgevlm.apps.serve.config import ServeConfig
    from edgevlm.apps.serve.errors import STATUSES
    from edgevlm.apps.serve.http import make_app
    from edgevlm.apps.serve.service import Service

    openapi = make_app(Service(ServeConfig(), print)).openapi()
    routes = [(path, method, route) for path, methods in openapi["paths"].items() for method, route in methods.items()]
    errors = "\n".join(f"| {status} | {what} |" for status, what in STATUSES.items())
    parts = [HTTP_INTRO.format(errors=errors)]
    for tag in dict.fromkeys(route["tags"][0] for _, _, route in routes):
        parts.append(f"## {tag[0].upper()}{tag[1:]}\n")
        parts += [_route(path, method, route) for path, method, route in routes if route["tags"][0] == tag]
    schemas = {name: each for name, each in openapi["components"]["schemas"].items() if each.get("type") == "object"}
    parts.append("## Objects\n")
    parts += ["\n".join([f"### {name}\n", *_said(each), _fields(each)]) for name, each in schemas.items()]
    return "\n".join(parts)


HTTP_INTRO = """# HTTP

This page lists the routes of `edgevlm serve` with parameters, bodies and answers, from the server's `/openapi.json`.
[Serving](../guide/serving.md) shows how to use them, and [Several machines](../guide/cluster.md#asking) what a cluster adds.
Later versions may add fields to answers, so ignore fields that you do not know. An optional field may be missing.

With `server.key` set, every path except `/`, `/static/` and `/health/` needs the key: `Authorization: Bearer KEY`,
`X-Api-Key: KEY`, or Basic authentication with any name and the key as password.

Errors are JSON, as described under [ErrorReply](#errorreply):

| status | |
|---|---|
{errors}
"""


def _route(path: str, method: str, route: Any) -> str:
    parts = [f"### `{method.upper()} {path}`\n", *_said(route)]
    if parameters := route.get("parameters"):
        shapes = [(each, _shape(_without_null(each["schema"]), each["required"])) for each in parameters]
        rows = (f"| `{each['name']}` | {each['in']} | {shape} |" for each, shape in shapes)
        parts.append("\n".join(["| parameter | in | |", "|---|---|---|", *rows, ""]))
    if body := route.get("requestBody"):
        parts.append(f"Body: {_shape(body['content']['application/json']['schema'], True)}\n")
    for status, answer in route["responses"].items():
        if status.isdecimal():
            parts.append(f"Answers {status}: {' or '.join(f'`{kind}`' for kind in answer.get('content', ())) or 'nothing'}")
            parts[-1] += _answer(answer.get("content", {})) + "\n"
    return "\n".join(parts)


def _answer(content: Any) -> str:
    """Return a link to the JSON object's description, if it has one."""
    schema = content.get("application/json", {}).get("schema", {})
    return f", {_type(schema)}" if "$ref" in schema else ""


def _said(thing: Any) -> list[str]:
    text = thing.get("description", "").replace("``", "`")
    return [f"{text}\n"] if text else []


def _fields(schema: Any) -> str:
    needed = schema.get("required", ())
    rows = (
        f"| `{name}` | {_shape(each, name in needed)} | {_one_line(each.get('description', ''))} |"
        for name, each in schema.get("properties", {}).items()
    )
    return "\n".join(["| field | type | |", "|---|---|---|", *rows, ""])


def _without_null(schema: Any) -> Any:
    """Return a parameter's schema without null, which a parameter cannot be."""
    kinds = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return {**schema, "anyOf": kinds} if kinds else schema


def _shape(schema: Any, needed: bool) -> str:
    """Return a type with its limits, and its default or the word optional."""
    said = _type(schema)
    default = f"`{json.dumps(schema['default'])}`" if schema.get("default") not in (None, "") else said
    if default not in (said, said.removesuffix(" or null")):
        return f"{said}, default {default}"
    return said if needed else f"{said}, optional"


def _type(schema: Any) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any JSON")
    limits = [f"{word} {schema[key]:g}" for key, word in LIMITS.items() if schema.get(key, UNSAID) < UNSAID]
    limits += _range(schema, "Length", "characters") + _range(schema, "Items", "items")
    if "pattern" in schema:
        limits.append(f"pattern `{_one_line(schema['pattern'])}`")
    said = f"{'list' if kind == 'array' else kind} ({', '.join(limits)})" if limits else "list" if kind == "array" else kind
    return f"{said} of {_type(schema.get('items') or schema.get('prefixItems', [{}])[0])}" if kind == "array" else said


def _range(schema: Any, of: str, unit: str) -> list[str]:
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if most is None:
        return [f"at least {least} {unit}"] if least else []
    return [f"{least} to {most} {unit}" if least else f"at most {most} {unit}"]


UNSAID = 2**31 - 1  # a limit this large is only the type's own
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


if __name__ == "__main__":
    folder = Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    (folder / "json.md").write_text(json_lines())
    (folder / "http.md").write_text(http())

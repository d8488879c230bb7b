"""Declare the options that several commands share, and make options from the fields of settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from glob import glob
from inspect import Parameter
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from edgevlm.errors import UserError, reason


def check_finite(param: typer.CallbackParam, value: Any) -> Any:
    """Return the option's value. Raises UserError for NaN, infinity, and numbers that are too large or too small."""
    if isinstance(value, float) and not (value == 0 or 1e-9 <= abs(value) <= 1e15):
        raise UserError(f"{param.opts[0]} {value:g}: must be 0 or a number from 1e-9 to 1e15")
    return value


def values_of(name: str) -> Callable[..., list[str]] | None:
    """Return a function that completes the values of option ``name`` in the shell."""

    def complete(incomplete: str) -> list[str]:
        from edgevlm.engines.devices import device_names
        from edgevlm.runtime.plugins import names

        if name == "model":
            from edgevlm.apps.planning.model import published_facts

            known = ["demo", *(each["id"] for each in published_facts())]
        elif name == "camera":
            known = ["demo", "csi://0", *sorted(glob("/dev/video*"))]
        else:
            known = (
                device_names() if name == "device" else ["auto", *names("policies")] if name == "policy" else names("engines")
            )
        return [each for each in known if each.startswith(incomplete)]

    return complete if name in ("camera", "device", "engine", "model", "policy") else None


def option(metavar: str | None, help: str, default: str | bool = True, panel: str | None = None, **more: Any) -> Any:
    """Return an option for typer. ``default`` describes the default in words. ``panel`` is the heading in ``--help``."""
    more.setdefault("callback", check_finite)
    return typer.Option(metavar=metavar, help=help, show_default=default, rich_help_panel=panel, **more)


def flag(name: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option without a value, such as ``--json`` or ``--layers/--no-layers``."""
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


Threads = Annotated[int | None, option("N", "Use this many CPU threads.", "physical cores", min=1, max=256)]
Device = Annotated[
    str | None,
    option("NAME", "Plan for orin-nano-8, orin-agx-64, cpu, cuda, ..", "this machine", autocompletion=values_of("device")),
]
Json = Annotated[bool, flag("--json", "Print one JSON object per line.")]
KeyFile = Annotated[Path | None, option("FILE", "Read the server's key from this file.")]
Snapshots = Annotated[str | None, option("ADDRESS", "Keep snapshots at this address, such as s3://BUCKET/DIR.", "in --state")]
EncryptWith = Annotated[Path | None, option("FILE", "Encrypt snapshots with this file's key.")]
StateKeyFile = Annotated[Path | None, option("FILE", "Decrypt snapshots with this file's key.")]
KV = Annotated[
    Literal["fp32", "fp16", "int8"] | None, option("fp32|fp16|int8", "Store keys and values in this precision.", "fp16")
]


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def of_file(path: Path | None) -> str | None:
    """Return ``file:PATH``, from which :func:`edgevlm.apps.credentials.secret` reads a secret."""
    return None if path is None else f"file:{path}"


def lines(variable: str) -> list[str]:
    """Split an environment variable at line ends. Click would split the variable at every blank."""
    return os.environ.get(variable, "").splitlines()


def show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for each in ctx.command.params:
            each.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, flag("--help-all", "Show all options.", is_eager=True, callback=show_all, allow_from_autoenv=False)]


def with_settings(
    model: Any, panels: Mapping[str | None, Iterable[str]], rare: Iterable[str] = (), *, typed_only: bool = False
) -> Callable[[Any], Any]:
    """Return a decorator that adds options for the fields of a pydantic model to a command.

    The command gets the values as ``settings``: an instance of ``model`` or, with ``typed_only``, a dict of the typed options.
    ``panels``: the fields under each heading. ``rare``: the fields that only ``--help-all`` shows.
    """
    shown = {name: panel for panel, fields in panels.items() for name in fields}
    lists = {name for name in shown if get_origin(model.model_fields[name].annotation) is list}

    def decorate(function: Any) -> Any:
        own = inspect.signature(function, eval_str=True).parameters.values()
        others = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own if each.name != "settings"]
        made = [_parameter(model.model_fields[name], name, panel, name in rare, typed_only) for name, panel in shown.items()]
        if rare:
            made.append(Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))

        @wraps(function)
        def command(**typed: Any) -> Any:
            typed.pop("help_all", None)
            values = {name: typed.pop(name) for name in shown}
            values |= {name: lines(f"EDGEVLM_{function.__name__}_{name}".upper()) for name in lists if not values[name]}
            return function(settings=given(**values) if typed_only else checked(model, given(**values)), **typed)

        facade: Any = command
        facade.__signature__ = inspect.Signature([*others, *made] if typed_only else [*made, *others])
        facade.__annotations__ = {each.name: each.annotation for each in (*made, *others)}
        return facade

    return decorate


def checked(model: Any, values: Mapping[str, Any]) -> Any:
    """Return an instance of ``model`` with these values. Raises a one-line UserError that names the option."""
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field, why = str(first["loc"][0]), reason(first["msg"])
        named, value = field.replace("_", "-"), f" {first['input']}" if why.startswith("Input") else ""
        raise UserError(f"--{named}{value} {why.removeprefix(field).strip()}".replace(" Input should", ": should")) from None


def _parameter(field: Any, name: str, panel: str | None, hidden: bool, typed_only: bool) -> Parameter:
    """Make a command-line option from a field, with the field's type, help and default."""
    is_list = get_origin(field.annotation) is list
    first = get_args(field.annotation)[0] if get_origin(field.annotation) in (Union, UnionType) else field.annotation
    words = {type(each).__name__: each for each in (*getattr(first, "__metadata__", ()), *field.metadata)}
    base = get_args(first)[0] if get_origin(first) is Annotated else first
    kind: Any = base if base in (bool, int, float) or get_origin(base) is Literal else list[str] if is_list else str
    default = None if typed_only or is_list else field.default
    if kind is bool:
        dashed = f"--{name.replace('_', '-')}"
        made = flag(dashed if default is False else f"{dashed}/--no-{dashed[2:]}", field.description, panel, hidden=hidden)
    else:
        usual = words["Shown"].text if "Shown" in words and not typed_only else True
        made = option(
            words["Metavar"].text,
            field.description,
            usual,
            panel,
            hidden=hidden,
            allow_from_autoenv=not is_list,
            autocompletion=values_of(name),
        )
        default = default if kind is not str or default is None else str(default)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, made])

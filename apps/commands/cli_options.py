"""Options that several commands have, declared here or made from the fields of settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from edgevlm.errors import UserError, reason


def check_finite(param: typer.CallbackParam, value: Any) -> Any:
    """Return a number as typed. Raises UserError for NaN, infinity and numbers that arithmetic makes infinite."""
    if isinstance(value, float) and not (value == 0 or 1e-9 <= abs(value) <= 1e15):
        raise UserError(f"{param.opts[0]} {value:g}: give an ordinary number")
    return value


def option(metavar: str | None, help: str, default: str | bool = True, panel: str | None = None, **more: Any) -> Any:
    """An option as ``--help`` shows it. default: in words, where the value does not say it; panel: its heading."""
    more.setdefault("callback", check_finite)
    return typer.Option(metavar=metavar, help=help, show_default=default, rich_help_panel=panel, **more)


def flag(name: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """An option without a value: ``--json``, or ``--layers/--no-layers``."""
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


def threads(default: str | bool = True, panel: str | None = None) -> Any:
    return option("N", "Use this many CPU threads.", default, panel, min=1, max=256)


Threads = Annotated[int | None, threads("physical cores")]
Budget = Annotated[str | None, option("N|6k", "Keep this many vision tokens per layer.", "6144; others: as run")]
Device = Annotated[str | None, option("NAME", "Plan for orin-nano-8, orin-agx-64, cpu, cuda, ..", "this machine")]
Json = Annotated[bool, flag("--json", "Print one JSON object a line.")]
KeyFile = Annotated[Path | None, option("FILE", "Read the server's key from this file.")]
Snapshots = Annotated[str | None, option("ADDRESS", "Keep snapshots at s3://BUCKET/FOLDER or the like.", "in --state")]
EncryptWith = Annotated[Path | None, option("FILE", "Encrypt snapshots with this key.")]
StateKeyFile = Annotated[Path | None, option("FILE", "Read encrypted snapshots with this key.")]
KV = Annotated[
    Literal["fp32", "fp16", "int8"] | None,
    option("fp32|fp16|int8", "Store keys and values as this.", "fp16 on GPUs, else fp32"),
]


def lines(variable: str) -> list[str]:
    """Read one value a line: click would split at every blank."""
    return os.environ.get(variable, "").splitlines()


def show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for each in ctx.command.params:
            each.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, flag("--help-all", "Show all options.", is_eager=True, callback=show_all, allow_from_autoenv=False)]


def with_settings(
    model: Any, panels: Mapping[str | None, Iterable[str]], rare: Iterable[str] = (), *, given: bool = False
) -> Callable[[Any], Any]:
    """Give a command an option for each of these fields, under its panel; the command takes them as ``settings``.

    That is an instance of the model, whose errors name the option; where ``given``, a dict of the options that were typed.
    rare: fields that only ``--help-all`` shows.
    """

    def decorate(function: Any) -> Any:
        own = inspect.signature(function, eval_str=True).parameters
        shown = {name: panel for panel, fields in panels.items() for name in fields}
        made = [_parameter(model, name, panel, name in rare, given) for name, panel in shown.items()]
        if rare:
            made.append(Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))
        others = [each.replace(kind=Parameter.KEYWORD_ONLY) for name, each in own.items() if name != "settings"]
        made = [*others, *made] if given else [*made, *others]

        @wraps(function)
        def command(**typed: Any) -> Any:
            typed.pop("help_all", None)
            values = {name: typed.pop(name) for name in shown}
            for name in shown:
                if not values[name] and get_origin(model.model_fields[name].annotation) is list:
                    values[name] = lines(f"EDGEVLM_{function.__name__}_{name}".upper())
            if given:
                return function(settings={name: value for name, value in values.items() if value is not None}, **typed)
            return function(settings=checked(model, values), **typed)

        facade: Any = command
        facade.__signature__ = inspect.Signature(made)
        facade.__annotations__ = {each.name: each.annotation for each in made}
        return facade

    return decorate


def checked(model: Any, values: Mapping[str, Any]) -> Any:
    """Return the model of these values. Raises UserError, one line that names the option."""
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field, why = str(first["loc"][0]), reason(first["msg"])
        raise UserError(f"--{field.replace('_', '-')} {why.removeprefix(field).strip()}") from None


def _parameter(model: Any, name: str, panel: str | None, hidden: bool, given: bool) -> Parameter:
    """The option of a field: its type, help, default, bounds and how help shows it."""
    field = model.model_fields[name]
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    kind, *others = [each for each in kinds if each is not NoneType]
    found = {type(each).__name__: each for each in (*getattr(kind, "__metadata__", ()), *field.metadata)}
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is list:
        kind = list[str]
    elif others or not (kind in (bool, int, float, Path) or get_origin(kind) is Literal):
        kind = str  # which a validator of the model reads
    bounds = (("min", "Ge", "ge"), ("max", "Le", "le"))
    more = {"hidden": hidden, **{key: getattr(found[bound], of) for key, bound, of in bounds if bound in found}}
    default = None if given or kind == list[str] else field.default
    if kind is bool:
        dashed = name.replace("_", "-")
        made = flag(f"--{dashed}/--no-{dashed}" if default is None else f"--{dashed}", field.description, panel, **more)
    else:
        shown = found["Shown"].text if "Shown" in found and not given else True
        more["allow_from_autoenv"] = kind != list[str]
        made = option(found["Metavar"].text, field.description, shown, panel, **more)
    if kind is str and default is not None:
        default = str(default)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, made])

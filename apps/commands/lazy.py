"""A command line that imports a command when it is called, and refuses environment variables that set nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from edgevlm.errors import UserError

FOREIGN = {"EDGEVLM_BUILD_JOBS"}  # begins like an option of `edgevlm build` and is read by setup.py


class PlainCommand(TyperCommand):
    """A command whose help is plain text in 80 columns, its options under the headings of ``rich_help_panel``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)


class LazyGroup(TyperGroup):
    """Lists its commands by name and summary; ``targets`` says which ``module:attribute`` each is, a function or a Typer."""

    targets: ClassVar[Mapping[str, str]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.targets:
            command = self.load(name)
        if command is not None and not hasattr(command, "commands") and not {"--help", "-h"} & set(rest):
            check_environment(f"{ctx.auto_envvar_prefix}_{str(name).upper()}_", f"{ctx.command_path} {name}", command)
        return name, command, rest

    def load(self, name: str) -> Any:
        """The command of a name, imported."""
        return load_command(name, self.targets[name])

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = list(super().get_params(ctx))
        for param in params:
            param.allow_from_autoenv = False  # EDGEVLM_VERSION=1 is not --version
        return params

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)
        headings: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            summary = command.help or ""
            headings.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, summary))
        for heading, rows in headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def lazy_app(commands: Mapping[str, tuple[str, str]], panels: Mapping[str, str] | None = None, **settings: Any) -> typer.Typer:
    """A Typer of ``commands``, name -> (``module:attribute``, summary). panels: name -> the heading it is listed under."""

    class Group(LazyGroup):
        targets: ClassVar[Mapping[str, str]] = {name: target for name, (target, _) in commands.items()}

    app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
    for name, (_, summary) in commands.items():
        app.command(name, help=summary, rich_help_panel=(panels or {}).get(name))(_listed)
    return app


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write arguments and options under their headings, without their variables, which the epilog explains."""
    headings: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        param.show_envvar = False
        if (record := param.get_help_record(ctx)) is not None:
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            rows = headings.setdefault(getattr(param, "rich_help_panel", None) or usual, [])
            rows.append((record[0].partition(" <")[0], with_default(record[1])))
    for heading, rows in headings.items():
        with formatter.section(heading):
            formatter.write_dl(rows)


def with_default(text: str) -> str:
    """click's ``help  [default: (8.0); x>=1]`` as ``help (default: 8)``: what a range forbids, its error says."""
    words, bracket, extra = text.rpartition("  [")
    default = next((part for part in extra.rstrip("]").split("; ") if part.startswith("default: ")), "")
    shown = default.removeprefix("default: ").removesuffix(".0").removeprefix("(").removesuffix(")")
    return f"{words} (default: {shown})" if default else words if bracket else text


def load_command(name: str, target: str) -> Any:
    """The command of ``module:attribute``; what the module's ``EPILOG`` has for it ends its help."""
    module, _, attribute = target.partition(":")
    found, epilog = getattr(import_module(module), attribute), getattr(import_module(module), "EPILOG", None)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, cls=PlainCommand, epilog=epilog.get(name) if isinstance(epilog, dict) else epilog)(found)
    return typer.main.get_command(alone)


def check_environment(prefix: str, path: str, command: Any) -> None:
    """Raise UserError for a variable that begins with ``prefix`` and sets no option; name the nearest one that does."""
    known = [str(param.name).upper() for param in command.params]
    for name in sorted(os.environ):
        if name.startswith(prefix) and (typed := name.removeprefix(prefix)) not in known and name not in FOREIGN:
            nearest = difflib.get_close_matches(typed, known, n=1)
            hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"see {path} --help"
            raise UserError(f"{name}: {path} has no such option; {hint}")


def _listed() -> None:
    raise NotImplementedError  # listed, never called: resolve_command puts the command in its place

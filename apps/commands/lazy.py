"""A command line that imports a command when it is called, and refuses environment variables that set nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from edgevlm.errors import UserError

FOREIGN = {"EDGEVLM_BUILD_JOBS"}  # begins like an option of `edgevlm build` and is read by setup.py


class LazyGroup(TyperGroup):
    """Lists its commands by name and summary; ``targets`` says which ``module:attribute`` each is, a function or a Typer."""

    targets: ClassVar[Mapping[str, str]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.targets:
            command = load_command(name, self.targets[name])
        if command is not None and not hasattr(command, "commands") and not {"--help", "-h"} & set(rest):
            check_environment(f"{ctx.auto_envvar_prefix}_{str(name).upper()}_", f"{ctx.command_path} {name}", command)
        return name, command, rest


def lazy_app(commands: Mapping[str, tuple[str, str]], panels: Mapping[str, str] | None = None, **settings: Any) -> typer.Typer:
    """A Typer of ``commands``, name -> (``module:attribute``, summary). panels: name -> the heading it is listed under."""

    class Group(LazyGroup):
        targets: ClassVar[Mapping[str, str]] = {name: target for name, (target, _) in commands.items()}

    app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, **settings)
    for name, (_, summary) in commands.items():
        app.command(name, help=summary, rich_help_panel=(panels or {}).get(name))(_listed)
    return app


def load_command(name: str, target: str) -> Any:
    """The command of ``module:attribute``; a module's ``EPILOG`` ends its help."""
    module, _, attribute = target.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    alone.command(name, epilog=getattr(import_module(module), "EPILOG", None))(found)
    return typer.main.get_command(alone)


def check_environment(prefix: str, path: str, command: Any) -> None:
    """Raise UserError for a variable that begins with ``prefix`` and sets no option; name the nearest one that does."""
    known = [prefix + str(param.name).upper() for param in command.params]
    for name in sorted(os.environ):
        if name.startswith(prefix) and name not in known and name not in FOREIGN:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"see {path} --help"
            raise UserError(f"{name}: {path} has no such option; {hint}")


def _listed() -> None:
    raise NotImplementedError  # listed, never called: resolve_command puts the command in its place

"""A command line that imports each command only when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


class PlainHelp:
    """Help in plain text that lists options under the headings of ``rich_help_panel``, without their environment variables."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        rows = []
        for param in self.get_params(ctx):
            param.show_envvar = False
            if (record := param.get_help_record(ctx)) is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                heading = getattr(param, "rich_help_panel", None) or usual
                rows.append((heading, record[0].partition(" <")[0], with_default(record[1])))
        write_under_headings(rows, formatter)


class PlainCommand(PlainHelp, TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class LazyGroup(PlainHelp, TyperGroup):
    """A group that imports commands when they are called. ``targets`` holds each command's ``module:attribute``."""

    targets: ClassVar[Mapping[str, str]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        target = self.targets.get(name or "")
        return name, load_command(name, target) if target else command, rest

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = list(super().get_params(ctx))
        for param in params:
            param.allow_from_autoenv = False  # EDGEVLM_VERSION=1 must not act as --version
        return params

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        commands: Mapping[str, Any] = self.commands
        listed = [(each.rich_help_panel or "Commands", name, each.help or "") for name, each in commands.items()]
        write_under_headings([(heading, name, text.partition("\n")[0]) for heading, name, text in listed], formatter)


def lazy_app(commands: Mapping[str, tuple[str, ...]], **settings: Any) -> typer.Typer:
    """Return a Typer. ``commands`` maps names to ``module:attribute``, a summary and an optional heading."""

    class Group(LazyGroup):
        targets: ClassVar[Mapping[str, str]] = {name: about[0] for name, about in commands.items()}

    def listed() -> None:
        raise NotImplementedError  # resolve_command loads the real command

    app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
    for name, (_, summary, *heading) in commands.items():
        app.command(name, help=summary, rich_help_panel=heading[0] if heading else None)(listed)
    return app


def plain_app(commands: Mapping[str, Callable[..., None]], **settings: Any) -> typer.Typer:
    """Return a Typer with a command for each function in ``commands``."""
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
    for name, function in commands.items():
        app.command(name, cls=PlainCommand)(function)
    return app


def write_under_headings(rows: Sequence[tuple[str, ...]], formatter: Any) -> None:
    for heading in dict.fromkeys(row[0] for row in rows):
        with formatter.section(heading):
            formatter.write_dl([row[1:] for row in rows if row[0] == heading])


def with_default(text: str) -> str:
    """Rewrite click's ``help [default: (8.0); x>=1]`` as ``help (default: 8)``; the range is shown in errors only."""
    words, bracket, extra = text.rpartition("  [")
    default = next((part for part in extra.rstrip("]").split("; ") if part.startswith("default: ")), "")
    shown = default.removeprefix("default: ").removesuffix(".0").removeprefix("(").removesuffix(")")
    return f"{words} (default: {shown})" if default else words if bracket else text


def load_command(name: str | None, target: str) -> Any:
    """Return the command at ``module:attribute``. If the module has an ``EPILOG``, the command's help ends with it."""
    module, _, attribute = target.partition(":")
    found, epilog = getattr(import_module(module), attribute), getattr(import_module(module), "EPILOG", None)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, cls=PlainCommand, epilog=epilog.get(name or "") if isinstance(epilog, dict) else epilog)(found)
    return typer.main.get_command(alone)

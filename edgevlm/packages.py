"""Packages that only some commands need: where one is not installed, one line names it and the command that installs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError


def install(extra: str) -> str:
    """Return the command that installs what ``extra`` names: from the clone that this is, else by name."""
    clone = Path(__file__).resolve().parents[1]
    return f"pip install -e '{clone}[{extra}]'" if (clone / "pyproject.toml").is_file() else f"pip install 'edgevlm[{extra}]'"


@contextmanager
def needs(what: str, extra: str | None = None) -> Iterator[None]:
    """A block that imports other packages; raises UserError if one is not installed.

    what: begins the line, "exporting" or "engine onnxruntime-cpu". extra: ``edgevlm[extra]`` installs them; None where each
    is installed by the name it is imported by; empty for packages of a plugin.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            how = {None: f": pip install {str(error.name).partition('.')[0]}", "": ""}.get(extra, f": {install(extra or '')}")
            raise UserError(f"{what} needs the package {error.name}, which is not installed{how}") from None
        if str(error.name).startswith("edgevlm"):
            raise
        why = str(error).splitlines()[0]
        raise UserError(f"{what} needs a package that cannot be loaded ({why}); install it again") from error


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``: it imports each name from its home, a module of edgevlm's, when it is first read."""

    def read(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"edgevlm.{homes[name]}"), name)

    return read


def needed(module: str, what: str, extra: str | None = None) -> Any:
    """Import a module of edgevlm's own that imports such packages; raises UserError in the same cases."""
    with needs(what, extra):
        return import_module(module)

"""Import packages that only some commands need. If a package is missing, the error has the command that installs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError


def install(extra: str) -> str:
    """Return the command that installs an extra of edgevlm, from this clone if edgevlm runs from a clone, else from PyPI."""
    clone = Path(__file__).resolve().parents[1]
    return f"pip install -e '{clone}[{extra}]'" if (clone / "pyproject.toml").is_file() else f"pip install 'edgevlm[{extra}]'"


@contextmanager
def needs(what: str, extra: str | None = None) -> Iterator[None]:
    """Guard a block that imports optional packages: raise UserError if one is not installed.

    ``what``: the subject of the error message, such as "exporting". The message tells the user to install ``extra``, or the
    missing package if ``extra`` is None. If ``extra`` is empty, the message does not say what to install.
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
    """Return a module's ``__getattr__`` that imports each name from its module on first use."""

    def read(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"edgevlm.{homes[name]}"), name)

    return read


def needed(module: str, what: str, extra: str | None = None) -> Any:
    """Import an edgevlm module that needs optional packages. Raises UserError in the same cases as :func:`needs`."""
    with needs(what, extra):
        return import_module(module)

"""Packages that only some commands need: where one is not installed, one line says which, and how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from edgevlm.errors import UserError


@contextmanager
def needs(what: str, extra: str | None = None) -> Iterator[None]:
    """A block that imports other packages; raises UserError where one is not installed.

    what: begins the line, "exporting" or "engine onnxruntime-cpu". extra: ``edgevlm[extra]`` installs them; None where each
    is installed by the name it is imported by; empty for packages of somebody else's.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = f"'edgevlm[{extra}]'" if extra else str(error.name).partition(".")[0]
        how = "" if extra == "" else f": pip install {package}"
        raise UserError(f"{what} needs the package {error.name}, which is not installed{how}") from None
    except ImportError as error:
        if str(error.name).startswith("edgevlm"):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"{what} needs a package that is installed and cannot be loaded ({reason}); install it anew") from error


def needed(module: str, what: str, extra: str | None = None) -> Any:
    """Import a module of edgevlm's own that imports such packages; raises UserError likewise."""
    with needs(what, extra):
        return import_module(module)

"""Packages that only some commands need: where one is not installed, one line says which, and how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from edgevlm.errors import UserError


@contextmanager
def needs(what: str, extra: str = "export") -> Iterator[None]:
    """A block that imports other packages, which ``edgevlm[extra]`` installs; raises UserError where one is not installed.

    what: begins the line, "exporting" or "engine onnxruntime-cpu". extra: empty for packages of somebody else's.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        how = f": pip install 'edgevlm[{extra}]'" if extra else ""
        raise UserError(f"{what} needs the package {error.name}, which is not installed{how}") from None
    except ImportError as error:
        if str(error.name).startswith("edgevlm"):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"{what} needs a package that is installed and cannot be loaded ({reason}); install it anew") from error


def needed(module: str, what: str, extra: str = "export") -> Any:
    """Import a module of edgevlm's own that imports such packages; raises UserError likewise."""
    with needs(what, extra):
        return import_module(module)

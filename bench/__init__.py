"""Performance and accuracy as commands."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from edgevlm.errors import UserError


def writing(module: str) -> Any:
    """Import a module that writes a model of random weights; raises UserError where what the export needs is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"writing a model needs the package {error.name}, which is not installed: pip install 'edgevlm[export]'"
        ) from None

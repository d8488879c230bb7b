"""edgevlm: watch a video stream within a fixed memory budget and answer questions about it."""

import os
import sys
from glob import glob
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgevlm.apps.sources import open_source
    from edgevlm.errors import UserError
    from edgevlm.runtime.answer import Answer
    from edgevlm.runtime.model import Model
    from edgevlm.runtime.session import Session

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads this on import and would otherwise send telemetry

if not glob(f"{__path__[0]}/runtime/_native*.so"):  # in a clone without a built extension, use the installed copy
    built = [found for entry in sys.path if (found := glob(f"{entry}/edgevlm/runtime/_native*.so"))]
    __path__ = [os.path.dirname(os.path.dirname(built[0][0]))] if built else __path__

__version__: str
__all__ = ["Answer", "Model", "Session", "UserError", "__version__", "open_source"]

_HOMES = {
    "Answer": "runtime.answer",
    "Model": "runtime.model",
    "Session": "runtime.session",
    "UserError": "errors",
    "open_source": "apps.sources",
}


def __dir__() -> list[str]:
    return [*__all__, "extend", "testing"]


def __getattr__(name: str) -> Any:
    """Import each name on first use, so that the command starts quickly."""
    if name == "__version__":
        from importlib.metadata import version

        return version("edgevlm")
    if name in ("extend", "testing"):
        from importlib import import_module

        return import_module(f"edgevlm.{name}")
    from edgevlm.packages import lazy_names

    return lazy_names(__name__, _HOMES)(name)

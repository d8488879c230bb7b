"""Backends, one file each: tensors in, tensors out. The registry imports a backend only when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgevlm.errors import UserError

if TYPE_CHECKING:
    from edgevlm.engines.base import Engine
    from edgevlm.runtime.bundle import Bundle

# name -> (module, class, the extra that installs its backend)
ENGINES: dict[str, tuple[str, str, str]] = {
    "onnxruntime-cpu": ("edgevlm.engines.onnxruntime_cpu", "OnnxRuntimeCpu", "cpu"),
}
DEFAULT_ENGINE = "onnxruntime-cpu"

__all__ = ["DEFAULT_ENGINE", "ENGINES", "load_engine"]


def load_engine(name: str, bundle: Bundle, **options: Any) -> Engine:
    """Load ``bundle`` on the backend ``name``.

    ``options`` are the backend's own (``threads`` for the CPU). Raises UserError if the name is unknown or its package
    is not installed.
    """
    try:
        module_name, class_name, extra = ENGINES[name]
    except KeyError:
        raise UserError(f"no engine is called {name!r}; there is {', '.join(sorted(ENGINES))}") from None
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"engine {name} needs the package {error.name}, which is not installed: pip install 'edgevlm[{extra}]'"
        ) from None
    engine: Engine = getattr(module, class_name)(bundle, **options)
    return engine

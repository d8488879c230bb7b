"""Backends, one file each: tensors in, tensors out. The registry imports a backend only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgevlm.errors import UserError
from edgevlm.packages import needed

if TYPE_CHECKING:
    from edgevlm.runtime.bundle import Bundle
    from edgevlm.runtime.engine import Engine

# name -> (module, class, the extra that installs its backend)
ENGINES: dict[str, tuple[str, str, str]] = {
    "onnxruntime-cpu": ("edgevlm.engines.onnxruntime_cpu", "OnnxRuntimeCpu", "cpu"),
    "onnxruntime-cuda": ("edgevlm.engines.onnxruntime_cuda", "OnnxRuntimeCuda", "cuda"),
    "tensorrt": ("edgevlm.engines.tensorrt.engine", "TensorRT", "tensorrt"),
}
DEFAULT_ENGINE = "onnxruntime-cpu"

__all__ = ["DEFAULT_ENGINE", "ENGINES", "engine_class", "import_backend", "load_engine"]


def load_engine(name: str, bundle: Bundle, **options: Any) -> Engine:
    """Load ``bundle`` on the backend ``name``.

    ``options`` are the backend's own (``threads`` for the CPU). Raises UserError if the name is unknown or its package
    is not installed.
    """
    engine: Engine = engine_class(name)(bundle, **options)
    return engine


def engine_class(name: str) -> Any:
    """What ``name`` loads bundles with. Raises UserError if the name is unknown or its package is not installed."""
    try:
        module, class_name, _ = ENGINES[name]
    except KeyError:
        raise UserError(f"no engine is called {name!r}; there is {', '.join(sorted(ENGINES))}") from None
    return getattr(import_backend(name, module), class_name)


def import_backend(name: str, module: str) -> Any:
    """A module of the backend ``name``; raises UserError, with what to install, where a package that it needs is missing."""
    return needed(module, f"engine {name}", ENGINES[name][2])

"""Runtimes that decode the same weights, one file each: edgevlm's own and those it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError

if TYPE_CHECKING:
    from edgevlm.bench.runtimes.text_model import TextModel

OURS = "edgevlm"
# name -> (module, class, precisions of weights, of keys and values, how to get it)
RUNTIMES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...], str]] = {
    OURS: (
        "edgevlm.bench.runtimes.ours",
        "Ours",
        ("fp32", "fp16", "int8", "int4", "int4-zp"),
        ("fp32", "fp16"),
        "pip install 'edgevlm[cpu]'",
    ),
    "llama.cpp": (
        "edgevlm.bench.runtimes.llama_cpp",
        "LlamaCpp",
        ("fp32", "fp16", "int8", "int4"),
        ("fp32", "fp16"),
        "CMAKE_ARGS=-DGGML_NATIVE=ON pip install gguf llama-cpp-python (it compiles for some minutes)",
    ),
    "transformers": (
        "edgevlm.bench.runtimes.torch_decoder", "TorchDecoder", ("fp32",), ("fp32",), "pip install 'edgevlm[export]'",
    ),
}  # fmt: skip


class Runtime(Protocol):
    """A decoder of one :class:`TextModel`, with a memory of its own."""

    def hold(self, rows: int) -> None:
        """From here on the memory holds ``rows`` rows of whatever content; no timing includes this."""
        ...

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        """Decode ``ids`` after the rows held; the last one's logits ``[vocab]``, or None without ``scores``."""
        ...

    def forget(self) -> None:
        """Hold what :meth:`hold` said again."""
        ...

    def close(self) -> None: ...


def check_runtimes(names: Sequence[str]) -> None:
    """Raises UserError for a name that is no other runtime's."""
    for name in names:
        if name == OURS or name not in RUNTIMES:
            raise UserError(f"--against {name}: there is {', '.join(other for other in RUNTIMES if other != OURS)}")


def missing(name: str) -> str | None:
    """How to get the runtime ``name``, one line, where a package of it is not installed."""
    module, *_, how = RUNTIMES[name]
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return f"{name} is left out, because the package {error.name} is not installed: {how}"
    return None


def start(name: str, model: TextModel, precision: str, threads: int, capacity: int, kv: str = "fp32") -> Runtime:
    """The runtime ``name`` with ``model``'s weights in ``precision``, and an empty memory of ``capacity`` rows of ``kv``."""
    module, kind, *_ = RUNTIMES[name]
    runtime: Any = getattr(import_module(module), kind)(model, precision, threads, capacity, kv)
    made: Runtime = runtime
    return made

"""List the runtimes that decode the same weights: edgevlm's decoder and those that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.noise import noise_cache
from edgevlm.bench.seeded import TextModel, decoder_bundle
from edgevlm.runtime.engine import load_engine
from edgevlm.runtime.kv import KV_TYPES, KVType
from edgevlm.runtime.plugins import names
from edgevlm.runtime.positions import rope_tables

OURS = "edgevlm"


class Runtime(Protocol):
    """A decoder to compare, with its own KV cache.

    ``hold`` fills the cache with ``rows`` rows of any content, untimed. ``append`` decodes ``ids`` after the held rows, and
    returns the last token's logits ``[vocab]`` if ``scores`` is set, otherwise None. ``forget`` drops the appended rows.
    """

    def hold(self, rows: int) -> None: ...
    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RuntimeKind:
    """A runtime's class, the weight and KV precisions it is measured with, and how to install it."""

    path: str
    precisions: tuple[str, ...]
    kv: tuple[str, ...] = KV_TYPES
    install: str = ""

    def lacks(self, precision: str) -> str:
        """Return the reason why the runtime cannot be measured (no such package or precision), or ``""``."""
        try:
            import_module(self.path.partition(":")[0])
        except ModuleNotFoundError as error:
            return f"package {error.name} is not installed; run {self.install}"
        return "" if precision in self.precisions else f"{precision} weights are not supported here"

    def start(self, model: TextModel, precision: str, threads: int, capacity: int, kv: str = "fp32") -> Runtime:
        """Start the runtime with an empty cache of ``capacity`` rows."""
        module, _, name = self.path.partition(":")
        runtime: Runtime = getattr(import_module(module), name)(model, precision, threads, capacity, kv)
        return runtime


RUNTIMES = {
    OURS: RuntimeKind("edgevlm.bench.speed.runtimes:Ours", tuple(names("precisions"))),
    "llama.cpp": RuntimeKind(
        "edgevlm.bench.speed.llama_cpp:LlamaCpp", ("fp32", "fp16", "int8", "int4"),
        install="CMAKE_ARGS=-DGGML_NATIVE=ON pip install gguf llama-cpp-python (compiling takes a few minutes)",
    ),
    "openvino": RuntimeKind(
        "edgevlm.bench.speed.openvino_decoder:OpenVino", ("fp32", "int8", "int4"),
        install="pip install openvino nncf torch transformers",
    ),
    "transformers": RuntimeKind(
        "edgevlm.bench.speed.torch_decoder:TorchDecoder", ("fp32",), ("fp32",), "pip install torch transformers"
    ),
}  # fmt: skip


class Ours:
    """edgevlm's decoder on the CPU engine as a :class:`Runtime`. The KV cache is filled with noise."""

    def __init__(self, model: TextModel, precision: str, threads: int, capacity: int, kv: KVType) -> None:
        self._folder, shape = TemporaryDirectory(prefix="edgevlm-bench-"), model.shape
        bundle = decoder_bundle(
            Path(self._folder.name), shape, tensors=model.tensors, backbone=model.backbone, precision=precision, kv=kv
        )
        self._engine: Any = load_engine("onnxruntime-cpu", bundle, threads=threads)
        self._inv_freq, self._lengths = bundle.inv_freq, np.zeros(shape.layers, np.int32)
        self._cache = noise_cache(shape.layers, shape.kv_heads, shape.head_dim, capacity, kv)
        self._decoder = self._engine.bind(self._cache.buffers())

    def hold(self, rows: int) -> None:
        self._lengths[:] = rows

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        start = int(self._lengths[0])
        embeds = self._engine.embed(np.asarray(ids, np.int64))
        tables = rope_tables(np.arange(start, start + len(ids), dtype=np.int32), self._inv_freq)
        logits = self._decoder.step(embeds, *tables, self._lengths, (-1,) if scores else ()).logits
        return logits[0] if scores else None

    def forget(self) -> None:
        """Do nothing, because :meth:`append` does not commit its rows to the cache."""

    def close(self) -> None:
        del self._decoder
        self._engine.close()
        self._folder.cleanup()

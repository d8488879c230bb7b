"""llama.cpp through llama-cpp-python: a GGUF file of the same tensors; keys and values in float16, its default, or float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.runtimes.gguf_file import write_gguf
from edgevlm.bench.runtimes.llama_state import fill
from edgevlm.bench.runtimes.text_model import TextModel
from edgevlm.errors import UserError

BATCH = 512
KV = {"fp32": gguf.GGMLQuantizationType.F32, "fp16": gguf.GGMLQuantizationType.F16}
_silence = lib.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """See :class:`edgevlm.bench.runtimes.Runtime`. The rows held are noise, or computed where states have another format."""

    def __init__(self, model: TextModel, precision: str, threads: int, capacity: int, kv: str) -> None:
        lib.llama_log_set(_silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._shape, self._kv, self._held = model.shape, kv, 0
        with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(path, model, precision)
            self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if self._model is None:
            raise UserError(f"llama.cpp {lib.__version__} cannot load {model.name}; leave it out of --against")
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = capacity, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = int(KV[kv])
        self._context: Any = lib.llama_init_from_model(self._model, settings)
        self._memory = lib.llama_get_memory(self._context)

    def hold(self, rows: int) -> None:
        lib.llama_memory_seq_rm(self._memory, 0, 0, -1)
        if rows and not fill(self._context, self._shape, rows, self._kv):
            for start in range(0, rows, BATCH):
                self._decode([0] * min(BATCH, rows - start))
        self._held = rows

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        for start in range(0, len(ids), BATCH):
            self._decode(ids[start : start + BATCH])
        if not scores:
            return None
        return np.ctypeslib.as_array(lib.llama_get_logits(self._context), (self._shape.vocab,)).copy()

    def forget(self) -> None:
        lib.llama_memory_seq_rm(self._memory, 0, self._held, -1)

    def close(self) -> None:
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    def _decode(self, ids: Sequence[int]) -> None:
        """Positions follow those in memory; the last row's logits are computed."""
        tokens = (lib.llama_token * len(ids))(*ids)
        if failed := lib.llama_decode(self._context, lib.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"llama_decode failed on {len(ids)} tokens: {failed}")

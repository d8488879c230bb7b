"""edgevlm's own decoder: a bundle written from the same tensors, on the engine of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.runtimes.text_model import TextModel
from edgevlm.bench.seeded import decoder_bundle
from edgevlm.runtime.engine import KVBuffer, KVType, load_engine
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.positions import rope_tables


class Ours:
    """See :class:`edgevlm.bench.runtimes.Runtime`. The rows held are noise, and a step does what a session's does."""

    def __init__(self, model: TextModel, precision: str, threads: int, capacity: int, kv: KVType) -> None:
        self._folder = TemporaryDirectory(prefix="edgevlm-bench-")
        folder = Path(self._folder.name)
        bundle = decoder_bundle(folder, model.tensors, model.shape, model.backbone, precision=precision, kv=kv)
        self._engine = load_engine("onnxruntime-cpu", bundle, threads=threads)
        self._inv_freq, shape = bundle.inv_freq, model.shape
        memory = (1, shape.kv_heads, capacity, shape.head_dim)
        rng = np.random.default_rng(0)
        stored = DTYPES[kv]
        arrays = [[rng.standard_normal(memory, np.float32).astype(stored) for _ in range(2)] for _ in range(shape.layers)]
        buffers = [KVBuffer(k.ctypes.data, v.ctypes.data, memory, k.dtype, (k, v)) for k, v in arrays]
        self._decoder = self._engine.bind(buffers)
        self._lengths = np.zeros(shape.layers, np.int32)

    def hold(self, rows: int) -> None:
        self._lengths[:] = rows

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        start = int(self._lengths[0])
        embeds = self._engine.embed(np.asarray(ids, np.int64))
        tables = rope_tables(np.arange(start, start + len(ids), dtype=np.int32), self._inv_freq)
        logits = self._decoder.step(embeds, *tables, self._lengths, (-1,) if scores else ()).logits
        return logits[0] if scores else None

    def forget(self) -> None:
        """Nothing was counted that was appended."""

    def close(self) -> None:
        del self._decoder
        self._engine.close()
        self._folder.cleanup()

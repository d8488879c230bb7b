"""Encoding changed patches alone on ONNX Runtime: the tower reads and writes its cache at the caller's address."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgevlm.engines.onnxruntime_layers import bind_array
from edgevlm.runtime.bundle import Bundle, ChangedTowerSpec
from edgevlm.runtime.engine import Float32, Int32, TowerBuffer
from edgevlm.runtime.kv import DTYPES


class OnnxRuntimeTower:
    """A tower bound to one stream's tower cache; see :class:`edgevlm.runtime.engine.ChangedTower`.

    Not for use by two threads at once.
    """

    def __init__(self, session: Any, bundle: Bundle, spec: ChangedTowerSpec, buffer: TowerBuffer, calls: Any) -> None:
        vision = bundle.vision
        self._session, self._spec, self._calls = session, spec, calls
        self._buffer = buffer  # keeps its owner alive
        self._shape = (3, *vision.size) if vision.group == 1 else (vision.group, 3, *vision.size)
        self._given_shape = (1, 3 * vision.group, *vision.size)
        self._width = bundle.decoder.row_width
        self._binding = session.io_binding()
        self._bind_cache()

    def encode(self, pixels: Float32, patches: Int32) -> tuple[Float32, Int32]:
        """Features of the tokens that any of ``patches`` is part of; see the protocol. Raises ValueError for other shapes."""
        if pixels.shape != self._shape or pixels.dtype != np.float32:
            raise ValueError(f"pixels must be float32 {list(self._shape)}, not {pixels.dtype} {list(pixels.shape)}")
        indices = np.ascontiguousarray(patches, np.int64)
        rising = np.diff(indices, prepend=-1, append=self._spec.patches)
        if indices.ndim != 1 or rising.min() < 1:
            raise ValueError(f"patches must be of 0 to {self._spec.patches - 1}, sorted, each once")
        if not len(indices):
            return np.zeros((0, self._width), np.float32), np.zeros(0, np.int32)
        given = np.ascontiguousarray(pixels).reshape(self._given_shape)
        bind_array(self._binding.bind_input, "pixel_values", given)
        bind_array(self._binding.bind_input, "patches", indices)
        for name in ("features", "tokens"):  # anew for each call: how many tokens they have is found by the graph
            self._binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(self._binding, self._calls.options)
        except Exception as error:
            raise RuntimeError(f"ONNX Runtime failed on {len(indices)} patches: {error}") from error
        features, tokens = (value.numpy() for value in self._binding.get_outputs()[-2:])
        return features, tokens.astype(np.int32)

    def _bind_cache(self) -> None:
        """Bind each part of the cache, one after another, as what the graph reads and what it writes."""
        spec, start = self._spec, self._buffer.address
        keys = [f"{part}{layer}" for layer in range(spec.layers) for part in ("key", "value")]
        shape = (1, spec.heads, spec.positions, spec.head_dim)
        parts: list[tuple[str, np.dtype, tuple[int, ...]]] = [(name, DTYPES[spec.kv], shape) for name in keys]
        parts += [(f"kept{index}", np.dtype(np.float32), (spec.patches, width)) for index, width in enumerate(spec.outputs)]
        for name, kind, sizes in parts:
            where = ("cpu", 0, kind.type, sizes, start)
            self._binding.bind_input(name, *where)
            self._binding.bind_output(f"{name}_out", *where)
            start += int(np.prod(sizes)) * kind.itemsize

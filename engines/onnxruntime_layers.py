"""On ONNX Runtime's CPU: the decoder layer by layer (L + 1 sessions, the caller between them), the tower of changed patches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort

from edgevlm.engines.inputs import check_layer, check_rows
from edgevlm.errors import CacheError
from edgevlm.runtime.bundle import Bundle, ChangedTowerSpec, DecoderSpec
from edgevlm.runtime.engine import Float32, Int32, KVBuffer, TowerBuffer
from edgevlm.runtime.kv import DTYPES

SAME_AS_REQUESTED = 1  # how an arena grows: by no more than is asked for
SHARED = {"session.use_env_allocators": "1", "session.use_device_allocator_for_initializers": "1"}


@cache
def share_arena() -> None:
    """Have one arena for the working memory of all sessions of this process that ask for it.

    The graphs run one after another: with an arena each they would keep the working memory of a call L + 1 times.
    """
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with suppress(Exception):  # the process has registered one already
        ort.create_and_register_allocator(where, ort.OrtArenaCfg({"arena_extend_strategy": SAME_AS_REQUESTED}))


def bind_array(bind: Any, name: str, array: np.ndarray) -> None:
    """Bind an array in the host's memory, which must outlive the binding."""
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class OnnxRuntimeLayers:
    """A per-layer decoder bound to one stream's memory; see :class:`edgevlm.runtime.engine.LayerDecoder`.

    Two sets of bindings, in which nothing is bound again: one for a single row and its logits, and one for calls of the last
    other size. Not for use by two threads at once.
    """

    def __init__(self, sessions: Sequence[Any], spec: DecoderSpec, buffers: Sequence[KVBuffer], calls: Any) -> None:
        self._sessions, self._spec, self._calls = tuple(sessions), spec, calls
        self._buffers = tuple(buffers)  # keeps their owners alive
        self._lengths = np.zeros((2, spec.layers, spec.kv_heads), np.int32)  # of each head after the call, and one less
        self._of_layer = list(self._lengths.transpose(1, 0, 2))
        self._one = self._many = self._call = BoundCall(self, 1, 1)
        self._next = spec.layers + 1  # the layer to attend next; beyond the last there is no call, and no logits

    def begin(self, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int] = (-1,)) -> Float32:
        """Layer 0's query; see the protocol. Raises CacheError before anything is run."""
        check_rows(self._spec, embeds, cos, sin, logit_rows)
        size = (len(embeds), len(logit_rows))
        if size != self._one.size and size != self._many.size:
            self._many = BoundCall(self, *size)
        self._call = self._one if size == self._one.size else self._many
        self._call.give(embeds, cos, sin, logit_rows)
        self._next = 0
        return self._run(0)

    def attend(self, layer: int, past: Int32) -> Float32 | None:
        """The next layer's query; see the protocol. Raises CacheFull or CacheError before a byte is changed."""
        spec, rows = self._spec, self._call.size[0]
        if layer != self._next or layer == spec.layers:
            wanted = f"layer {self._next} is next" if self._next < spec.layers else "begin a call first"
            raise CacheError(f"layer {layer} cannot be attended to now: {wanted}")
        check_layer(spec, self._buffers[layer].shape[2], layer, rows, past)
        total, last = self._of_layer[layer]
        np.add(past, rows, out=total)
        np.add(past, rows - 1, out=last)
        found = self._run(layer + 1)
        self._next = layer + 1
        if self._next < spec.layers:
            return found
        if self._calls.options is not None:  # memory is short: keep nothing for calls of this size
            self._many = self._one
        return None

    def logits(self) -> Float32:
        """``[R, vocab]`` of the rows asked for."""
        if self._next != self._spec.layers:
            raise CacheError("logits come after the last layer: attend to all of them first")
        logits: Float32 = self._call.logits[0].copy()
        return logits

    def _run(self, index: int) -> Float32:
        try:
            self._sessions[index].run_with_iobinding(self._call.bindings[index], self._calls.options)
        except Exception as error:
            self._next = self._spec.layers + 1
            raise RuntimeError(
                f"ONNX Runtime failed on {self._call.size[0]} rows in graph per-layer{index}: {error}"
            ) from error
        return self._call.queries[index % 2]


class BoundCall:
    """The small arrays of calls of S rows that ask for the logits of R, and each graph's binding to them and to the memory.

    What one graph gives the next one takes: two sets in turn. size: (S, R).
    """

    def __init__(self, decoder: OnnxRuntimeLayers, rows: int, logit_rows: int) -> None:
        s = decoder._spec
        self.size, self.hidden = (rows, logit_rows), s.hidden
        widths = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim, s.hidden)

        def array(width: int, count: int = rows) -> Float32:
            return np.zeros((1, count, width), np.float32)

        self.embeds, self.features = array(s.hidden), [array(s.hidden) for _ in range(s.deepstack)]
        self.cos, self.sin, self.logits = array(s.head_dim // 2), array(s.head_dim // 2), array(s.vocab, logit_rows)
        self.logit_rows = np.zeros(logit_rows, np.int64)
        self.passed = [[array(width) for width in widths] for _ in range(2)]
        self.queries = [query[0].reshape(rows, s.heads, s.head_dim).transpose(1, 0, 2) for query, *_ in self.passed]
        given: dict[str, np.ndarray] = {
            "inputs_embeds": self.embeds,
            "cos": self.cos,
            "sin": self.sin,
            "logit_rows": self.logit_rows,
        }
        given |= {f"features{layer}": features for layer, features in enumerate(self.features)}
        self.bindings = []
        for index, session in enumerate(decoder._sessions):
            names = [node.name for node in session.get_outputs() if not node.name.endswith("_out")]
            made: dict[str, np.ndarray] = dict(zip(names, self.passed[index % 2], strict=False))  # per-layer0 gives no residual
            binding = session.io_binding()
            if index:
                layer = index - 1
                _bind_memory(binding, layer, decoder._buffers[layer], decoder._lengths[:, layer])
            if index == s.layers:
                made = {"logits": self.logits}
            for node in session.get_inputs():
                if node.name in given:
                    bind_array(binding.bind_input, node.name, given[node.name])
            for name, each in made.items():
                bind_array(binding.bind_output, name, each)
            self.bindings.append(binding)
            given |= made
        self._given = given  # keeps them alive

    def give(self, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int]) -> None:
        """Take a call's rows; features that they do not have are zeros."""
        width = self.hidden
        self.embeds[0], self.cos[0], self.sin[0], self.logit_rows[:] = embeds[:, :width], cos, sin, logit_rows
        for start, features in enumerate(self.features, 1):
            features[0] = embeds[:, start * width : (start + 1) * width] if embeds.shape[1] > width else 0


def _bind_memory(binding: Any, layer: int, buffer: KVBuffer, lengths: Int32) -> None:
    """Bind each KV head of a layer to its part of the buffer, which is dense, and to its lengths ``[2, kv_heads]``."""
    _, heads, capacity, dim = buffer.shape
    parts = ("key", buffer.key_address, buffer.key_scale), ("value", buffer.value_address, buffer.value_scale)
    for head in range(heads):
        for part, address, scale in parts:
            name = f"{part}{layer}_{head}"
            start = address + head * capacity * dim * buffer.dtype.itemsize
            where = ("cpu", 0, buffer.dtype.type, (1, 1, capacity, dim), start)
            binding.bind_input(name, *where)
            binding.bind_output(f"{name}_out", *where)
            if scale is not None:
                bind_array(binding.bind_input, f"{part}_scale{layer}_{head}", scale[None, None, head : head + 1])
        for name, length in zip(("total_len", "last_row"), lengths, strict=True):
            bind_array(binding.bind_input, f"{name}{layer}_{head}", length[head : head + 1])


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

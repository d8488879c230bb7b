"""Run a decoder, and a vision tower for changed patches, on the CPU. A decoder with L layers has L + 1 sessions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort

from edgevlm.engines.inputs import check_pattern, check_probes, check_step
from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.bundle import Bundle, ChangedTowerSpec, DecoderSpec
from edgevlm.runtime.engine import Fetch, Float32, FramePattern, Int32, KVBuffer, Sight, StepResult, TowerBuffer, arrays_of
from edgevlm.runtime.kv import DTYPES

SAME_AS_REQUESTED = 1  # arena_extend_strategy kSameAsRequested: an arena grows by the requested size only
SHARED = {"session.use_env_allocators": "1", "session.use_device_allocator_for_initializers": "1"}


@cache
def share_arena() -> None:
    """Create an arena for working memory that the sessions of this process can share.

    A decoder's L + 1 sessions run one after another, so they can reuse the same memory.
    """
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with suppress(Exception):  # another library has registered an arena already
        ort.create_and_register_allocator(where, ort.OrtArenaCfg({"arena_extend_strategy": SAME_AS_REQUESTED}))


def attention_of(layer: int) -> str:
    """Return the name that the graphs give a layer's attention output."""
    return f"layer{layer}.attention"


def check_parts(parts: Sequence[Any], spec: DecoderSpec) -> None:
    """Raise ValueError if a decoder's parts do not fit together or do not fit the model's dimensions."""
    query, key, half = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.rotary
    known = {"inputs_embeds": spec.hidden, "cos": half, "sin": half} | {
        f"features{n}": spec.hidden for n in range(spec.deepstack)
    }
    for index, part in enumerate(parts):
        made = {node.name: node.shape[-1] for node in part.get_outputs()}
        taken = {node.name: node.shape[-1] for node in part.get_inputs() if node.name != "logit_rows"}
        known[attention_of(index - 1)] = query
        wanted = [spec.vocab] if index == spec.layers else [query, key, key, spec.hidden]
        if not index and len(made) == 3:  # part 0 outputs a residual only if it is rotated: an unrotated one equals the input
            wanted.pop()
        if list(made.values()) != wanted or any(known.get(name) != width for name, width in taken.items()):
            raise ValueError(
                f"part {index} of the decoder has inputs {taken} and outputs {made}, which do not match bundle.json"
            )
        known |= made


def bind_array(bind: Any, name: str, array: np.ndarray) -> None:
    """Let ONNX Runtime use an array in host memory. The caller must keep the array alive."""
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class OnnxRuntimeDecoder:
    """Runs a decoder on one stream's cache. See :class:`edgevlm.runtime.engine.Decoder`.

    The decoder's dense parts run in ONNX Runtime or, if the extension has them, in C++; int8 parts run in C++ only for a single
    row. Between two parts, :func:`edgevlm.runtime.kernels.attend` reads and writes the cache in place. Not thread-safe.
    ``sessions``: the L + 1 parts for ONNX Runtime. ``row_parts``: the parts for the C++ extension. ``sparse_from``: the first
    layer that uses a call's ``pattern``.
    """

    def __init__(
        self,
        sessions: Sequence[Any],
        row_parts: Sequence[Any],
        spec: DecoderSpec,
        buffers: Sequence[KVBuffer],
        probes: Sequence[int],
        calls: Any,
        sparse_from: int | None,
        threads: int,
    ) -> None:
        check_probes(spec, probes)
        self._sessions, self._spec, self._calls, self._sparse_from = tuple(sessions), spec, calls, sparse_from
        self._probes, self._threads, self._row_parts = frozenset(probes), threads, tuple(row_parts)
        self._capacity = np.array([buffer.shape[2] for buffer in buffers], np.int64)
        self._memory = [(*arrays_of(buffer), buffer) for buffer in buffers]  # the buffer keeps the arrays' memory alive
        self._one = self._many = BoundCall(self._sessions, spec, 1, 1)

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
        rows: Sequence[Sequence[Int32]] | None = None,
        fetch: Fetch | None = None,
        sight: Sight | None = None,
    ) -> StepResult:
        """Append S rows to the cache in place. Raises CacheFull or CacheError without changing the cache."""
        spec, size = self._spec, (len(embeds), len(logit_rows))
        check_step(spec, self._capacity, embeds, cos, sin, past_len, logit_rows)
        if sight is None and not spec.is_causal:
            raise CacheError("sight is missing; this decoder requires it for attention windows or whole frames")
        check_pattern(spec, len(embeds), past_len, pattern, self._sparse_from is not None)
        if size not in (self._one.size, self._many.size):
            self._many = BoundCall(self._sessions, spec, *size)
        call = self._one if size == self._one.size else self._many
        call.give(embeds, cos, sin, logit_rows)
        self._run(call, 0)
        probes, past = {}, np.repeat(past_len.astype(np.int32)[:, None], spec.kv_heads, 1)
        for layer, (keys, values, buffer) in enumerate(self._memory):
            query = call.query(layer)
            if layer in self._probes:
                probes[layer] = query.copy()
            if fetch is not None:
                past[layer] += fetch(layer, query)
            how: dict[str, Any] = {"key_scale": buffer.key_scale, "value_scale": buffer.value_scale, "threads": self._threads}
            if rows is not None:
                how["rows"] = rows[layer]
            if sight is not None:
                window = spec.windows[layer] if spec.windows else 0
                how |= {"until": sight.until, "window": window, "place": sight.place, "position": sight.held[layer]}
            if pattern is not None and layer >= (self._sparse_from or 0):
                how |= {"shared": pattern.shared, "previous": pattern.previous[layer]}
            call.attention[0] = kernels.attend(*call.given(layer), keys, values, past[layer], **how)
            self._run(call, layer + 1)
        if self._calls.options is not None:  # memory is short: drop the arrays for calls of this size
            self._many = self._one
        return StepResult(call.logits[0].copy(), probes)

    def _run(self, call: BoundCall, index: int) -> None:
        part = self._row_parts[index]
        if part is not None and (call.is_plain_row or part.any_rows):
            part.run(*call.rows(index), self._threads)
            return
        try:
            self._sessions[index].run_with_iobinding(call.bindings[index], self._calls.options)
        except Exception as error:
            raise RuntimeError(f"ONNX Runtime failed on {call.size[0]} rows in part {index} of the decoder: {error}") from error


class BoundCall:
    """The input and output arrays of a decoder's parts. ``size``: the number of new rows, and the number of rows with logits.

    The parts use two sets of output arrays in turn, because each part reads the outputs of the one before.
    """

    def __init__(self, sessions: Sequence[Any], s: DecoderSpec, rows: int, logit_rows: int) -> None:
        self.size, self._spec = (rows, logit_rows), s
        widths = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim, s.hidden)

        def array(width: int, count: int = rows) -> Float32:
            return np.zeros((1, count, width), np.float32)

        self._embeds, self._features = array(s.hidden), [array(s.hidden) for _ in range(s.deepstack)]
        self._cos, self._sin, self.logits = array(s.rotary), array(s.rotary), array(s.vocab, logit_rows)
        self._logit_rows, self.attention = np.zeros(logit_rows, np.int64), array(widths[0])
        self._passed = [[array(width) for width in widths] for _ in range(2)]
        self.is_plain_row = False  # a single row without DeepStack's features
        given: dict[str, np.ndarray] = {
            "inputs_embeds": self._embeds,
            "cos": self._cos,
            "sin": self._sin,
            "logit_rows": self._logit_rows,
        }
        given |= {f"features{layer}": features for layer, features in enumerate(self._features)}
        self.bindings, self._residuals = [], [self._embeds]  # each part's binding, and the residual it reads
        for index, session in enumerate(sessions):
            binding, names = session.io_binding(), [node.name for node in session.get_outputs()]
            made = dict(zip(names, self._passed[index % 2], strict=False))  # part 0 may have no residual among its outputs
            self._residuals.append(self._passed[index % 2][3] if len(made) == 4 else self._embeds)
            if index == s.layers:
                made = {"logits": self.logits}
            for node in session.get_inputs():
                attended = node.name == attention_of(index - 1)
                bind_array(binding.bind_input, node.name, self.attention if attended else given[node.name])
            for name, each in made.items():
                bind_array(binding.bind_output, name, each)
            self.bindings.append(binding)
            given |= made

    def give(self, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int]) -> None:
        """Copy a call's inputs into the arrays. Rows without DeepStack features are padded with zeros."""
        width = self._spec.hidden
        self._embeds[0], self._cos[0], self._sin[0], self._logit_rows[:] = embeds[:, :width], cos, sin, logit_rows
        self.is_plain_row = len(embeds) == 1 and embeds.shape[1] == width
        for start, features in enumerate(self._features, 1):
            features[0] = embeds[:, start * width : (start + 1) * width] if embeds.shape[1] > width else 0

    def given(self, layer: int) -> tuple[Float32, Float32, Float32]:
        """Return the query, key and value that a layer has computed. Query: ``[S, Hq D]``. Key and value: ``[S, Hkv D]``."""
        query, key, value, _ = self._passed[layer % 2]
        return query[0], key[0], value[0]

    def rows(self, index: int) -> list[Float32]:
        """Return one part's inputs (attention, residual, cos, sin) and outputs (query, key, value, residual)."""
        taken = (self.attention, self._residuals[index], self._cos, self._sin)
        return [array[0] for array in (*taken, *self._passed[index % 2])]

    def query(self, layer: int) -> Float32:
        heads = self._passed[layer % 2][0].reshape(self.size[0], self._spec.heads, self._spec.head_dim)
        return heads.transpose(1, 0, 2)


class OnnxRuntimeTower:
    """Encodes the changed patches of one stream. See :class:`edgevlm.runtime.engine.ChangedTower`. Not thread-safe."""

    def __init__(self, session: Any, bundle: Bundle, spec: ChangedTowerSpec, buffer: TowerBuffer, calls: Any) -> None:
        vision = bundle.vision
        self._session, self._spec, self._calls = session, spec, calls
        self._buffer = buffer  # a reference keeps the memory alive
        self._shape = (3, *vision.size) if vision.group == 1 else (vision.group, 3, *vision.size)
        self._given_shape = (1, 3 * vision.group, *vision.size)
        self._width = bundle.decoder.row_width
        self._binding = session.io_binding()
        self._bind_cache()

    def encode(self, pixels: Float32, patches: Int32) -> tuple[Float32, Int32]:
        """Encode the tokens that contain any of these patches. Raises ValueError for invalid arguments."""
        if pixels.shape != self._shape or pixels.dtype != np.float32:
            raise ValueError(f"pixels must be float32 {list(self._shape)}, not {pixels.dtype} {list(pixels.shape)}")
        indices = np.ascontiguousarray(patches, np.int64)
        rising = np.diff(indices, prepend=-1, append=self._spec.patches)
        if indices.ndim != 1 or rising.min() < 1:
            raise ValueError(f"patches must be sorted, unique and between 0 and {self._spec.patches - 1}")
        if not len(indices):
            return np.zeros((0, self._width), np.float32), np.zeros(0, np.int32)
        given = np.ascontiguousarray(pixels).reshape(self._given_shape)
        bind_array(self._binding.bind_input, "pixel_values", given)
        bind_array(self._binding.bind_input, "patches", indices)
        for name in ("features", "tokens"):  # bind again for each call: the graph determines the number of tokens
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

"""ONNX Runtime on the CPU: the decoder appends in place through bindings that last as long as the decoder.

Threads: ``threads`` in all for one call (the physical cores by default). Workers spin for work while a call
runs, and sleep when it ends, so that the vision and decoder sessions, which never run at once in one stream, do not slow each
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort

from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.inputs import (
    Embedding,
    changed_spec,
    check_buffers,
    check_graphs,
    check_probes,
    check_step,
    graph_of,
    grouped_pixels,
    per_layer_files,
)
from edgevlm.engines.onnx_file import FLOAT16, external_types, operators
from edgevlm.engines.onnxruntime_layers import SHARED, OnnxRuntimeLayers, OnnxRuntimeTower, bind_array, share_arena
from edgevlm.engines.threads import default_threads
from edgevlm.engines.weights_memory import settle_weights
from edgevlm.errors import BundleError, CacheError, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Float32, FramePattern, Int32, Int64, KVBuffer, KVDevice, StepResult, TowerBuffer
from edgevlm.runtime.graph_profiles import ONNXRUNTIME

MAX_THREADS = 256  # ONNX Runtime starts all that it is told, for each graph


def has_vnni() -> bool:
    """Whether the processor, as Linux describes it, adds up products of 8-bit numbers in 32 bits."""
    flags = Machine().fields("proc/cpuinfo").get("flags", "").split()
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


class Calls:
    """What is asked of each call of ONNX Runtime, of all sessions of an engine alike.

    A session's arena keeps the most that any of its calls took. With ``short`` each call gives back what it did not need.
    """

    def __init__(self, shrunk: str = "cpu:0") -> None:
        self.options: Any = None
        self._giving_back = ort.RunOptions()
        self._giving_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrunk)

    def release_memory(self, short: bool) -> None:
        self.options = self._giving_back if short else None


class OnnxRuntimeCpu:
    """One bundle loaded on the CPU; see :class:`edgevlm.runtime.engine.Engine`."""

    kv_device: KVDevice = "host"
    ort_device = "cpu"  # the same, as ONNX Runtime calls it
    shrunk = "cpu:0"  # the arenas that :meth:`release_memory` is about
    providers: Sequence[Any] = ("CPUExecutionProvider",)

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise UserError(f"threads must be 1 to {MAX_THREADS}, not {threads}")
        if bundle.profile != ONNXRUNTIME:
            raise UserError(
                f"{bundle.path}: is for {bundle.profile}; build its engines (edgevlm build {bundle.path}) and give "
                "--engine tensorrt, or export the checkpoint with --device cpu"
            )
        check_graphs(bundle)
        self.bundle = bundle
        self.threads = threads or default_threads()
        self._calls = Calls(self.shrunk)
        self._embedding = Embedding(bundle)
        self._decoders: dict[str, Any] = {}  # by variant, opened when first bound
        self._changed: Any = None  # and that of changed patches
        self._per_layer: list[Any] = []  # and those of the per-layer decoder

    def _open(self, name: str, *, copies: bool = True) -> Any:
        session = self._session_of(name, {}, copies=copies)
        if copies or self._stored[0]:
            settle_weights(self.bundle.path)
        return session

    def _session_of(self, name: str, entries: Mapping[str, str], *, copies: bool = True) -> Any:
        """A session of one graph, with further entries of its configuration.

        With ``copies`` it holds the matrices in the kernels' own layout, in memory of its own. Without, it reads them from the
        mapped file, whose pages all sessions and processes share and the system can drop; a call of few rows is slower.
        Matrices of integers are copied always: ONNX Runtime does not round activations for those that it has not packed,
        so that two graphs of one bundle would compute differently.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 4  # what goes wrong is raised
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.disable_prepacking", "0" if copies or self._stored[0] else "1")
        # without VNNI 8-bit products are added up in 16 bits, which overflow; "1" adds in 32, and is slower
        options.add_session_config_entry("session.x64quantprecision", "0" if has_vnni() else "1")
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        if not copies and self._stored[1]:  # else float16 matrices become float32 in memory
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        path = self.bundle.file(name)
        try:
            return ort.InferenceSession(str(path), options, providers=self.providers)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise BundleError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load it ({reason}); check the disk, or upgrade onnxruntime"
            ) from error

    @cached_property
    def _stored(self) -> tuple[bool, bool]:
        graph = self.bundle.file(self.bundle.decoder.graphs["full"]).read_bytes()
        return "MatMulNBits" in operators(graph), FLOAT16 in external_types(graph)

    @classmethod
    def takes(cls, bundle: Bundle) -> bool:
        """Whether a bundle's graphs are of this engine's profile."""
        return bundle.profile == ONNXRUNTIME

    def encode(self, pixels: Float32) -> Float32:
        """Frames ``[F, 3, H, W]``, normalised, to features ``[G, tokens_per_frame, row_width]``; see the protocol.

        In int8 one group goes in at a time: the numbers of a call are rounded together, and a frame's features must not depend
        on its company.
        """
        vision = self.bundle.vision
        grouped = grouped_pixels(vision, pixels)
        if not len(grouped):
            tokens = vision.for_frames(*grouped.shape[2:]).tokens_per_frame
            return np.zeros((0, tokens, self.bundle.decoder.row_width), np.float32)
        calls = np.split(grouped, len(grouped)) if vision.precision == "int8" else [grouped]
        features = [self._vision.run(["features"], {"pixel_values": call}, self._calls.options)[0] for call in calls]
        return np.concatenate(features) if len(features) > 1 else features[0]

    @cached_property
    def _vision(self) -> Any:
        return self._open(self.bundle.vision.graph)

    def capacity(self, rows: int) -> int:
        """Any number of rows can be bound."""
        return rows

    def embed(self, token_ids: Int64) -> Float32:
        """Token ids ``[N]`` to embeddings ``[N, hidden]``, gathered from the mapped file."""
        return self._embedding.rows(np.asarray(token_ids, np.int64).reshape(-1))

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), variant: str = "full") -> OnnxRuntimeDecoder:
        """A decoder bound to one buffer a layer, which also returns the queries of the layers in ``probes``.

        A variant's graph is opened when first asked for. Only ``full`` holds matrices in memory of its own.
        """
        kv = "fp32" if variant == "fp32-kv" else self.bundle.decoder.kv
        check_buffers(self.bundle, buffers, kv)
        return OnnxRuntimeDecoder(self._session(variant), self.bundle, buffers, probes, self._calls, self.ort_device)

    def bind_layers(self, buffers: Sequence[KVBuffer]) -> OnnxRuntimeLayers:
        """The per-layer decoder bound to one buffer a layer; its graphs are opened when first asked for.

        Together they hold the matrices once, packed as ``full`` does: an engine of which this alone is asked has no ``full``.
        """
        spec = self.bundle.decoder
        check_buffers(self.bundle, buffers, spec.kv)
        files = per_layer_files(self.bundle)
        if not self._per_layer:
            share_arena()
            self._per_layer = [self._session_of(file, SHARED) for file in files]
            settle_weights(self.bundle.path)
        return OnnxRuntimeLayers(self._per_layer, spec, buffers, self._calls)

    def bind_tower(self, buffer: TowerBuffer) -> OnnxRuntimeTower:
        """The tower bound to one stream's tower cache; its graph is opened when first asked for."""
        spec = changed_spec(self.bundle, buffer)
        if self._changed is None:
            self._changed = self._open(spec.graph)
        return OnnxRuntimeTower(self._changed, self.bundle, spec, buffer, self._calls)

    def _session(self, variant: str) -> Any:
        if variant not in self._decoders:
            self._decoders[variant] = self._open(graph_of(self.bundle, variant), copies=variant == "full")
        return self._decoders[variant]

    def release_memory(self, short: bool) -> None:
        """While memory is short, give back after each call the working memory that it took; calls are slower then."""
        self._calls.release_memory(short)

    def close(self) -> None:
        """Let go of the sessions; decoders already bound keep what they need until they are dropped."""
        for name in ("_vision", "_decoders", "_changed", "_per_layer", "_embedding"):
            self.__dict__.pop(name, None)


class OnnxRuntimeDecoder:
    """A decoder bound to one stream's memory; see :class:`edgevlm.runtime.engine.Decoder`.

    Two sets of bindings: one for a single row and its logits, in which nothing is rebound between calls, and one for
    everything else, in which only the small inputs and the outputs are. Not for use by two threads at once.
    A graph that takes a pattern is told it with each call.
    """

    def __init__(
        self,
        session: Any,
        bundle: Bundle,
        buffers: Sequence[KVBuffer],
        probes: Sequence[int],
        calls: Calls,
        ort_device: str,
    ) -> None:
        self._calls, self._ort_device = calls, ort_device
        spec = bundle.decoder
        check_probes(spec, probes)
        self._session, self._spec = session, spec
        self._takes_pattern = any(node.name == "previous" for node in session.get_inputs())
        self._buffers = tuple(buffers)  # keeps their owners alive
        self._capacity = np.array([buffer.shape[2] for buffer in buffers], np.int64)
        self._probes = tuple(probes)
        self._total_len = np.zeros(spec.layers, np.int32)
        self._one = self._bind_memory()
        self._many = self._bind_memory()
        self._one_arrays = self._arrays(1, 1)
        self._bind_arrays(self._one, self._one_arrays)

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
    ) -> StepResult:
        """Append S rows in place; see the protocol. Raises CacheFull or CacheError before a byte is changed."""
        rows = len(embeds)
        check_step(self._spec, self._capacity, embeds, cos, sin, past_len, logit_rows)
        self._check_pattern(rows, past_len, pattern)
        np.add(past_len, rows, out=self._total_len, casting="same_kind")
        if rows == 1 and len(logit_rows) == 1 and pattern is None:
            arrays, binding = self._one_arrays, self._one
        else:
            arrays, binding = self._arrays(rows, len(logit_rows)), self._many
            if pattern is not None:
                arrays["shared"] = np.array([pattern.shared], np.int64)
                arrays["previous"] = np.ascontiguousarray(pattern.previous, np.int64)
            self._bind_arrays(binding, arrays)
        arrays["inputs_embeds"][0, :, : embeds.shape[1]], arrays["cos"][0], arrays["sin"][0] = embeds, cos, sin
        arrays["inputs_embeds"][0, :, embeds.shape[1] :] = 0
        arrays["logit_rows"][:] = logit_rows
        try:
            self._session.run_with_iobinding(binding, self._calls.options)
        except Exception as error:
            lengths = f"{int(past_len.min())} to {int(past_len.max())}"
            raise RuntimeError(f"ONNX Runtime failed on {rows} rows after {lengths}: {error}") from error
        heads, dim = self._spec.heads, self._spec.head_dim
        probes = {
            layer: np.ascontiguousarray(arrays[f"query{layer}"].reshape(rows, heads, dim).transpose(1, 0, 2))
            for layer in self._probes
        }
        logits = arrays["logits"][0]
        return StepResult(logits.copy() if binding is self._one else logits, probes)

    def _bind_memory(self) -> Any:
        binding = self._session.io_binding()
        for layer, buffer in enumerate(self._buffers):
            parts = ("key", buffer.key_address, buffer.key_scale), ("value", buffer.value_address, buffer.value_scale)
            for part, address, scale in parts:
                where = (self._ort_device, 0, buffer.dtype.type, buffer.shape, address)
                binding.bind_input(f"{part}{layer}", *where)
                binding.bind_output(f"{part}{layer}_out", *where)
                if scale is not None:
                    bind_array(binding.bind_input, f"{part}_scale{layer}", scale[None, :, None])
        bind_array(binding.bind_input, "total_len", self._total_len)
        return binding

    def _arrays(self, rows: int, logit_rows: int) -> dict[str, np.ndarray]:
        s = self._spec
        half = s.head_dim // 2
        arrays: dict[str, np.ndarray] = {
            "inputs_embeds": np.empty((1, rows, s.row_width), np.float32),
            "cos": np.empty((1, rows, half), np.float32),
            "sin": np.empty((1, rows, half), np.float32),
            "logit_rows": np.empty(logit_rows, np.int64),
            "logits": np.empty((1, logit_rows, s.vocab), np.float32),
        }
        return arrays | {f"query{layer}": np.empty((1, rows, s.heads * s.head_dim), np.float32) for layer in self._probes}

    def _bind_arrays(self, binding: Any, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            is_output = name == "logits" or name.startswith("query")
            bind_array(binding.bind_output if is_output else binding.bind_input, name, array)

    def _check_pattern(self, rows: int, past_len: Int32, pattern: FramePattern | None) -> None:
        if (pattern is not None) != self._takes_pattern:
            raise CacheError(f"this decoder graph {'needs a pattern' if self._takes_pattern else 'takes no pattern'}")
        if pattern is None:
            return
        (layers, heads, *patches), s = pattern.previous.shape, self._spec
        if (layers, heads) != (s.layers, s.kv_heads) or len(patches) != 1 or patches[0] < 1 or rows % patches[0]:
            wanted = f"[{s.layers}, {s.kv_heads}, p] for {rows} rows of whole frames"
            raise CacheError(f"previous must be {wanted}, not {list(pattern.previous.shape)}")
        if not 0 <= pattern.shared <= int(past_len.min()):
            raise CacheError(f"{pattern.shared} shared slots: the layers hold from {past_len.min()} rows")
        if np.any(pattern.previous >= past_len[:, None, None]) or int(pattern.previous.min()) < -1:
            raise CacheError("previous must hold slots of valid rows, or -1")

"""Run whole decoder graphs on a CUDA device with ONNX Runtime, with keys and values in device memory.

Inputs and outputs, a few kilobytes per call, are in host memory; ONNX Runtime copies them to and from the device. Nodes without
a CUDA kernel run on the CPU. GroupQueryAttention's CUDA kernel needs float16, so the bundle must keep fp16 keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import onnxruntime as ort

from edgevlm.engines.inputs import AGAIN, check_buffers, check_pattern, check_probes, check_step, graph_of
from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.engines.onnxruntime_layers import OnnxRuntimeTower, bind_array
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import (
    Decoder,
    Fetch,
    Float32,
    FramePattern,
    Int32,
    KVBuffer,
    KVDevice,
    Sight,
    StepResult,
    TowerBuffer,
)

PROVIDER = "CUDAExecutionProvider"
OPTIONS = {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}  # allocate no spare memory; no TF32 products


class OnnxRuntimeCuda(OnnxRuntimeCpu):
    """Runs one bundle on the first CUDA device. Raises UserError if ONNX Runtime would fall back to the CPU."""

    kv_device: KVDevice = "cuda"
    by_layer = False
    ort_device = "cuda"  # ONNX Runtime's name for ``kv_device``
    kv_types: Sequence[str] = ("fp16",)
    shrunk = "cpu:0;gpu:0"
    export_hint = "edgevlm export {} --device cuda"
    provider = PROVIDER
    providers: Sequence[Any] = ((PROVIDER, OPTIONS), "CPUExecutionProvider")

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        if self.provider not in (there := ort.get_available_providers()):
            raise UserError(
                f"ONNX Runtime {ort.__version__} does not support {self.provider}, only {', '.join(there)}; run pip uninstall "
                "onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu (the two packages overwrite each other)"
            )
        if bundle.decoder.kv not in self.kv_types:
            raise UserError(
                f"{bundle.path}: {bundle.decoder.kv} keys and values are not supported by ONNX Runtime on CUDA, only "
                f"{' or '.join(self.kv_types)}; export the model again with --kv fp16, or use --engine onnxruntime-cpu"
            )
        with redirect_stdout(sys.stderr):
            ort.preload_dlls()  # the system's loader does not find cuDNN and CUDA from wheels
        self._decoders: dict[str, Any] = {}
        super().__init__(bundle, threads=threads)
        _ = self._vision  # open the tower now, so that CUDA errors show before a stream begins

    @classmethod
    def takes(cls, bundle: Bundle) -> bool:
        return super().takes(bundle) and bundle.decoder.kv in cls.kv_types

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> Decoder:
        """Return a decoder that appends to these buffers, one per layer. ``sparse``: load the ``st-spattn`` graph too."""
        check_buffers(self.bundle, buffers, self.bundle.decoder.kv)
        return OnnxRuntimeCudaDecoder(self, "full", buffers, probes, sparse)

    def session(self, variant: str) -> Any:
        """Return the session for a decoder graph. The first call opens the session. Raises UserError if the bundle lacks the
        graph.
        """
        if variant not in self._decoders:
            opened = self._open(file := graph_of(self.bundle, variant), copies=variant == "full")
            keys = {node.name: node.type for node in opened.get_inputs()}["key0"]
            if (self.bundle.decoder.kv, keys) == ("fp16", "tensor(float)"):  # only the CPU engine runs the demo's graphs
                raise UserError(f"{self.bundle.path}: {file} requires fp32 keys; {AGAIN}, or use --engine onnxruntime-cpu")
            self._decoders[variant] = opened
        return self._decoders[variant]

    def bind_tower(self, buffer: TowerBuffer) -> OnnxRuntimeTower:
        """Raise UserError, because only onnxruntime-cpu can encode just the changed patches."""
        raise UserError("--encode changed requires --engine onnxruntime-cpu; use that engine or --encode all")

    def _open(self, name: str, *, copies: bool = True) -> Any:
        session = super()._open(name, copies=copies)
        if session.get_providers()[0] != self.provider:
            raise UserError(
                f"ONNX Runtime {ort.__version__} could not start {self.provider} and fell back to the CPU: CUDA or cuDNN is "
                "missing or incompatible; run edgevlm doctor to find out which, or use --engine onnxruntime-cpu"
            )
        return session


class OnnxRuntimeCudaDecoder:
    """Runs a whole decoder graph on one stream's cache. See :class:`edgevlm.runtime.engine.Decoder`.

    Calls for one row reuse their input and output arrays. Calls with a ``pattern`` run the ``st-spattn`` graph. The decoder is
    not thread-safe.
    """

    def __init__(
        self, engine: OnnxRuntimeCuda, variant: str, buffers: Sequence[KVBuffer], probes: Sequence[int], sparse: bool = False
    ) -> None:
        spec = engine.bundle.decoder
        check_probes(spec, probes)
        self._session, self._spec = engine.session(variant), spec
        self._calls, self._ort_device = engine.calls, engine.ort_device
        self._sparse = OnnxRuntimeCudaDecoder(engine, "st-spattn", buffers, probes) if sparse else None
        self._buffers = tuple(buffers)  # a reference keeps the memory alive
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
        rows: Sequence[Sequence[Int32]] | None = None,
        fetch: Fetch | None = None,
        sight: Sight | None = None,
    ) -> StepResult:
        """Append S rows to the cache in place. Raises CacheFull or CacheError without changing the cache."""
        assert (rows, fetch, sight) == (None, None, None), "a whole graph attends to all rows"
        check_step(self._spec, self._capacity, embeds, cos, sin, past_len, logit_rows)
        check_pattern(self._spec, len(embeds), past_len, pattern, self._sparse is not None)
        decoder = self if pattern is None or self._sparse is None else self._sparse
        return decoder._run(embeds, (cos, sin), past_len, logit_rows, pattern)

    def _run(
        self,
        embeds: Float32,
        tables: tuple[Float32, Float32],
        past_len: Int32,
        logit_rows: Sequence[int],
        pattern: FramePattern | None,
    ) -> StepResult:
        rows, (cos, sin) = len(embeds), tables
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
            raise RuntimeError(f"ONNX Runtime failed on {rows} rows after {lengths} cached rows: {error}") from error
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

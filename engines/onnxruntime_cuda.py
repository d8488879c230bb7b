"""ONNX Runtime on a CUDA device: the same graphs and bindings as on the CPU, keys and values bound at the device's addresses.

Rows that come and go, a few kilobytes a call, are bound in the host's memory; ONNX Runtime copies them. It puts what the CUDA
provider has no kernel for on the CPU: GroupQueryAttention has one for float16 alone, so the bundle must keep fp16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import onnxruntime as ort

from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.engines.onnxruntime_layers import OnnxRuntimeLayers, OnnxRuntimeTower
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import KVBuffer, KVDevice, TowerBuffer

PROVIDER = "CUDAExecutionProvider"
OPTIONS = {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}  # no more memory than asked for; float32 is float32


class OnnxRuntimeCuda(OnnxRuntimeCpu):
    """One bundle loaded on the first CUDA device. Raises UserError where it would run on the CPU instead."""

    kv_device: KVDevice = "cuda"
    ort_device = "cuda"
    kv_types: Sequence[str] = ("fp16",)
    shrunk = "cpu:0;gpu:0"
    export_hint = "edgevlm export {} --device cuda"
    provider = PROVIDER
    providers: Sequence[Any] = ((PROVIDER, OPTIONS), "CPUExecutionProvider")

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        if self.provider not in (there := ort.get_available_providers()):
            raise UserError(
                f"this ONNX Runtime ({ort.__version__}) has no {self.provider}, only {', '.join(there)}: pip uninstall "
                "onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu (each is installed over the other)"
            )
        if bundle.decoder.kv not in self.kv_types:
            raise UserError(
                f"{bundle.path}: keeps {bundle.decoder.kv} keys, and ONNX Runtime's attention on CUDA takes "
                f"{' or '.join(self.kv_types)}; export the model again with --kv fp16, or give --engine onnxruntime-cpu"
            )
        with redirect_stdout(sys.stderr):  # where it says what it does not find
            ort.preload_dlls()  # cuDNN and CUDA of wheels lie where no loader looks
        super().__init__(bundle, threads=threads)
        _ = self._vision  # opened at once: whether CUDA starts is known before a stream begins

    @classmethod
    def takes(cls, bundle: Bundle) -> bool:
        return super().takes(bundle) and bundle.decoder.kv in cls.kv_types

    def bind_layers(self, buffers: Sequence[KVBuffer]) -> OnnxRuntimeLayers:
        """No per-layer decoder runs on CUDA: raises UserError."""
        raise UserError("policies that fetch rows layer by layer run on --engine onnxruntime-cpu alone")

    def bind_tower(self, buffer: TowerBuffer) -> OnnxRuntimeTower:
        """The tower's cache lies in the host's memory, and CUDA's graphs read the device's: raises UserError."""
        raise UserError("--encode changed runs on --engine onnxruntime-cpu alone; give --encode all")

    def _open(self, name: str, *, copies: bool = True) -> Any:
        session = super()._open(name, copies=copies)
        if session.get_providers()[0] != self.provider:
            raise UserError(
                f"ONNX Runtime {ort.__version__} could not start {self.provider} and fell back to the CPU: its CUDA or cuDNN "
                "is missing or of another version; edgevlm doctor says which, --engine onnxruntime-cpu runs without"
            )
        return session

"""What an adapter does with graphs for TensorRT, on ONNX Runtime's CPU with plain numpy memory: the oracle of adapters too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Float32, StepResult
from edgevlm.runtime.graph_profiles import TENSORRT_10_15
from edgevlm.runtime.kv import DTYPES


class EngineRunner:
    """Append rows to ``keys[l]``, ``values[l]`` ``[1, kv_heads, capacity, head_dim]``, whose free rows hold NaN."""

    def __init__(self, bundle: Path, capacity: int = 96) -> None:
        self.bundle = Bundle.load(bundle)
        assert self.bundle.profile.startswith("tensorrt")
        spec = self.bundle.decoder
        shape, kind = (1, spec.kv_heads, capacity, spec.head_dim), DTYPES[spec.kv]
        self.keys = [np.full(shape, np.nan, kind) for _ in range(spec.layers)]
        self.values = [np.full(shape, np.nan, kind) for _ in range(spec.layers)]
        self.columns = np.arange(capacity, dtype=np.int32)
        self.past_len = np.zeros(spec.layers, np.int32)
        self.session = opened(self.bundle.file(spec.graphs["full"]))
        self.in_place = self.bundle.profile == TENSORRT_10_15

    def encode(self, pixels: Float32) -> Float32:
        """Groups of frames ``[G, group * 3, H, W]`` to features."""
        features: Float32 = opened(self.bundle.file(self.bundle.vision.graph)).run(["features"], {"pixel_values": pixels})[0]
        return features

    def step(self, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int] = (-1,)) -> StepResult:
        """As a bound decoder's, with the queries of every layer; counts the rows."""
        spec, rows = self.bundle.decoder, len(embeds)
        wide = np.zeros((1, rows, spec.row_width), np.float32)
        wide[0, :, : embeds.shape[1]] = embeds
        total = self.past_len + np.int32(rows)
        given: dict[str, NDArray] = {
            "inputs_embeds": wide, "cos": cos[None], "sin": sin[None], "total_len": total,
            "logit_rows": np.array(logit_rows, np.int64),
        }  # fmt: skip
        binding, parts = self.session.io_binding(), (("key", self.keys), ("value", self.values))
        for layer in range(spec.layers):
            read = int(total[layer] if self.in_place else self.past_len[layer])
            given[f"columns{layer}"] = self.columns[:read]
            for part, memory in parts:
                bind(binding.bind_input, f"{part}{layer}", memory[layer])
                if self.in_place:
                    bind(binding.bind_output, f"{part}{layer}_out", memory[layer])
        for name, array in given.items():
            bind(binding.bind_input, name, array)
        wanted = ["logits", *(f"query{layer}" for layer in range(spec.layers))]
        if not self.in_place:
            wanted += [f"new_{part}{layer}" for part, _ in parts for layer in range(spec.layers)]
        for name in wanted:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        # bound outputs come in the order in which they were bound
        found = dict(zip(wanted, binding.copy_outputs_to_cpu()[-len(wanted) :], strict=True))
        if not self.in_place:
            for layer in range(spec.layers):
                for part, memory in parts:
                    memory[layer][:, :, self.past_len[layer] : total[layer]] = found[f"new_{part}{layer}"]
        self.past_len = total
        by_head = (rows, spec.heads, spec.head_dim)
        probes = {layer: found[f"query{layer}"].reshape(by_head).transpose(1, 0, 2) for layer in range(spec.layers)}
        return StepResult(found["logits"][0], probes)


def opened(path: Path) -> Any:
    """A session that computes what the graph says: else a product of dequantised weights would round its rows to 8 bits."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def bind(how: Any, name: str, array: NDArray) -> None:
    how(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

"""Your own engine: `edgevlm run --engine ./examples/openvino_engine.py:OpenVino` (pip install openvino).

In a package, give the engine an entry point in the group "edgevlm.engines" of pyproject.toml.
edgevlm.extend.Engine lists what to implement. OpenVino runs tower and decoder in OpenVINO and inherits the rest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov

from edgevlm.extend import Decoder, KVBuffer, OnnxRuntimeCpu, StepResult, arrays_of


class OpenVino(OnnxRuntimeCpu):
    """An engine that runs tower and decoder on OpenVINO's CPU device, in float32."""

    by_layer = False  # the decoder is one graph

    def __init__(self, bundle: Any, **options: Any) -> None:
        super().__init__(bundle, **options)
        if bundle.decoder.kv == "int8" or bundle.decoder.deepstack:
            raise ValueError(f"{bundle.path}: int8 keys and DeepStack are not read here")
        self._tower, self._decoder = (self._compiled(name) for name in (bundle.vision.graph, bundle.decoder.graphs["full"]))

    def _compiled(self, name: str) -> Any:
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": self.threads}
        graph = ov.Core().read_model(str(self.bundle.file(name)))
        for node in graph.get_ops():  # OpenVINO would read only row 0 of cosines and sines
            if node.get_type_name() == "Gather" and node.input_value(1).get_node().get_friendly_name() == "rotary.start":
                node.output(0).replace(node.input_value(0))
        return ov.Core().compile_model(graph, "CPU", settings)

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Encode normalised frames [F, 3, H, W] to features [G, tokens_per_frame, row_width]."""
        if self.bundle.vision.group > 1:  # towers that merge frames run in ONNX Runtime
            return super().encode(pixels)
        return np.array(self._tower([np.ascontiguousarray(pixels)])[0])

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> Decoder:
        if sparse:
            raise ValueError("this engine has no sparse prefill; choose another policy")
        return OpenVinoDecoder(self._decoder, buffers, probes)


class OpenVinoDecoder:
    """A decoder bound to one stream's memory. The graph gets each layer's valid rows, and appends the new rows to them."""

    def __init__(self, compiled: Any, buffers: Sequence[KVBuffer], probes: Sequence[int]) -> None:
        self._request, self._buffers, self._probes = compiled.create_infer_request(), buffers, probes
        self._memory = [dict(zip(("key", "value"), arrays_of(buffer), strict=True)) for buffer in buffers]

    def step(
        self, embeds: np.ndarray, cos: np.ndarray, sin: np.ndarray, past_len: np.ndarray, logit_rows: Sequence[int] = (-1,),
        *others: Any, **absent: Any,
    ) -> StepResult:  # fmt: skip
        """Append S rows in place: embeds [S, hidden], cos and sin [S, head_dim / 2], past_len [layers]."""
        count = len(embeds)
        given = {"inputs_embeds": embeds[None], "cos": cos[None], "sin": sin[None]}
        given |= {"total_len": np.asarray(past_len + count, np.int32)}
        given |= {"logit_rows": np.array([row % count for row in logit_rows], np.int64)}
        for layer, memory in enumerate(self._memory):
            given |= {f"{name}{layer}": rows[None, :, : past_len[layer]] for name, rows in memory.items()}
        found = self._request.infer(given)
        for layer, memory in enumerate(self._memory):
            start, end = past_len[layer], past_len[layer] + count
            for name, rows in memory.items():
                rows[:, start:end] = found[f"{name}{layer}_out"][0, :, start:end]
        queries = {layer: found[f"query{layer}"][0] for layer in self._probes}
        dim = self._buffers[0].shape[3]
        probes = {layer: rows.reshape(count, -1, dim).transpose(1, 0, 2).copy() for layer, rows in queries.items()}
        return StepResult(np.array(found["logits"][0]), probes)

"""An engine of your own: `edgevlm run --engine ./examples/openvino_engine.py:OpenVinoTower` (pip install openvino).

A package offers it by name instead, with an entry point of the group "edgevlm.engines" in its pyproject.toml. All that an
engine must have is in edgevlm.extend.Engine; this one encodes frames by OpenVINO, and leaves the decoder to ONNX Runtime.
"""

from typing import Any

import numpy as np
import openvino as ov

from edgevlm.extend import OnnxRuntimeCpu


class OpenVinoTower(OnnxRuntimeCpu):
    """The vision tower on OpenVINO's CPU device, in float32."""

    def __init__(self, bundle: Any, **options: Any) -> None:
        super().__init__(bundle, **options)
        self._core = ov.Core()
        graph = self._core.read_model(str(bundle.file(bundle.vision.graph)))
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": self.threads}
        self._tower = self._core.compile_model(graph, "CPU", settings)

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Encode normalised frames [F, 3, H, W] to features [G, tokens_per_frame, row_width]."""
        if self.bundle.vision.group > 1:  # frames that a tower merges come as one
            return super().encode(pixels)
        return np.array(self._tower([np.ascontiguousarray(pixels)])[0])

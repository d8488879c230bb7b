"""A backend of your own: `edgevlm run --engine ./examples/my_engine.py:Mirrored`.

A package offers it by name instead, with an entry point of the group "edgevlm.engines" in its pyproject.toml. All that a
backend must have is in edgevlm.runtime.engine.Engine; this one changes what another sees.
"""

import numpy as np

from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu


class Mirrored(OnnxRuntimeCpu):
    """ONNX Runtime on the CPU, seeing every frame in a mirror."""

    def encode(self, pixels):
        """Frames [F, 3, H, W] to features [G, tokens_per_frame, row_width]."""
        return super().encode(np.ascontiguousarray(pixels[..., ::-1]))

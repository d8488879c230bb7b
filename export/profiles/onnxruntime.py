"""ONNX Runtime on CPU and CUDA: fused nodes of ``com.microsoft``, and GroupQueryAttention, which appends in place."""

from __future__ import annotations

from edgevlm.export.graph import IR_VERSION, OPSET
from edgevlm.export.kv import Memory
from edgevlm.export.profiles import Profile
from edgevlm.export.profiles.fused import Fused
from edgevlm.export.vision import PRECISIONS
from edgevlm.runtime.graph_profiles import ONNXRUNTIME

VARIANTS = ("whole", "st-spattn", "projections", "fp32-kv", "cut")
PROFILE = Profile(ONNXRUNTIME, OPSET, IR_VERSION, Fused, Memory, ("fp32", "fp16", "int8"), None, VARIANTS, PRECISIONS)

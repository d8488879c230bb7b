"""What a decoder's matrices are multiplied with while a model reads text: what GPTQ rounds them for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.precisions import Float32, Layout
from edgevlm.export.profiles import load_profile
from edgevlm.runtime.graph_profiles import ONNXRUNTIME

Samples = Mapping[str, NDArray[np.floating]]  # layer{l}.{qkv,output,gate_up,down} -> rows of its input, [n, in]


@dataclass(frozen=True, slots=True)
class ActivationSampler:
    """Makes samples, in a work folder, from what it has of them, and leaves them there. source: what they depend on."""

    source: str
    sample: Callable[[Path], Samples]


def rounded_layout(precision: str, profile: str = ONNXRUNTIME) -> Layout:
    """The layout of a precision's matrices; raises UserError for one that rounds nothing."""
    layout = load_profile(profile).precision(precision).matrices
    if not layout.is_integer:
        raise UserError(f"--rounding gptq is for integers, not {precision}; give --precision int4, int4-zp or int8 too")
    return layout


def hessian(samples: Samples, layer: int, matrix: str) -> Float32:
    """``x.T @ x`` ``[in, in]`` of a matrix's rows, over their number."""
    rows = samples[f"layer{layer}.{matrix}"].astype(np.float32)
    product: Float32 = rows.T @ rows / np.float32(len(rows))
    return product

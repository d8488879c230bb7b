"""Activation-aware scaling (AWQ, arXiv 2306.00978): columns that meet large activations are rounded more finely.

``W x = (W diag(s)) (diag(1/s) x)``: what is rounded is ``W diag(s)``, and 1/s is folded into what makes x, so that the graph
stays as it is: into the norm before q, k, v and before gate, up, and into the rows of up before down. (Not into the rows of v
before the output projection: the cache's values, whose norms policies go by, would no longer be the model's.) By sec. 3.2,
eq. 4 and 5, ``s = mean|x|^alpha``, and alpha is searched for the least ``|| Q(W diag(s)) diag(1/s) X - W X ||``; alpha = 0 is
plain rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.backbones import Float32, LayerWeights
from edgevlm.export.precisions import Layout
from edgevlm.export.profiles import load_profile
from edgevlm.runtime.graph_profiles import ONNXRUNTIME

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
Samples = Mapping[str, NDArray[np.floating]]  # layer{l}.{qkv,gate_up,down} -> rows of its input, [n, in]


@dataclass(frozen=True, slots=True)
class ActivationSampler:
    """Makes samples, in a work folder, from what it has of them, and leaves them there. source: what they depend on."""

    source: str
    sample: Callable[[Path], Samples]


def in_blocks(precision: str, profile: str = ONNXRUNTIME) -> Layout:
    """The layout of a precision's matrices; raises UserError for one that rounds nothing."""
    layout = load_profile(profile).precision(precision).matrices
    if not layout.is_integer:
        raise UserError(f"--scaling awq is for whole numbers, not for {precision}; give --precision int4, int4-zp or int8 too")
    return layout


def scaled(w: LayerWeights[Any], layer: int, samples: Samples, layout: Layout) -> LayerWeights[Any]:
    """The layer, which computes as before, with its matrices, which are numbers yet, scaled for ``layout``."""

    def scales(matrix: str, weight: Float32) -> Float32:
        return best_scales(weight, samples[f"layer{layer}.{matrix}"].astype(np.float32), layout)

    read, mlp, down = scales("qkv", w.qkv), scales("gate_up", w.gate_up), scales("down", w.down)
    of_rows = np.concatenate([np.ones_like(down), down])  # gate, then up
    return replace(
        w,
        input_norm=w.input_norm / read,
        qkv=w.qkv * read,
        mlp_norm=w.mlp_norm / mlp,
        gate_up=w.gate_up * mlp / of_rows[:, None],
        gate_up_bias=None if w.gate_up_bias is None else w.gate_up_bias / of_rows,
        down=w.down * down,
    )


def best_scales(weight: Float32, x: Float32, layout: Layout) -> Float32:
    """The scales ``[in]`` of a matrix ``[out, in]`` that rows ``x [n, in]`` lose least by; geometric middle 1."""
    magnitude = np.abs(x).mean(0)
    magnitude = np.maximum(magnitude, 1e-4 * magnitude.max() + 1e-12)

    def scales(alpha: float) -> Float32:
        found = magnitude**alpha
        return (found / np.sqrt(found.max() * found.min())).astype(np.float32)

    def loss(s: Float32) -> float:
        error = layout.rounded(weight * s) / s - weight
        return float(np.square(x @ error.T).sum(dtype=np.float64))

    return min((scales(alpha) for alpha in ALPHAS), key=loss)

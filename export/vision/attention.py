"""Full attention of a vision tower, in the graph as one of three forms.

``fused``: one node of ONNX Runtime's, which never holds the scores of all pairs at once. ``standard``: product, softmax and
product, the chain that TensorRT merges into one kernel where it has one; QUERIES queries at a time, so that where it has none
the scores of those and all keys are held, ``[G, heads, QUERIES, N]``, and not those of all pairs. ``half``: that in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from edgevlm.export.graph import CONTRIB

NAME = "edgevlm"
QUERIES = 1024
Form = Literal["fused", "standard", "half"]
_form: ContextVar[Form] = ContextVar("form", default="fused")


@contextmanager
def traced_as(form: Form) -> Iterator[None]:
    """What graphs traced meanwhile get."""
    before = _form.set(form)
    try:
        yield
    finally:
        _form.reset(before)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """``softmax(scale * q k') v`` of ``[batch, N, heads, head_dim]`` each: ``[batch, N, heads * head_dim]``."""
    heads, joined = query.shape[2], [part.flatten(2) for part in (query, key, value)]
    if torch.onnx.is_in_onnx_export() and _form.get() != "fused":
        return _chain(query, key, value, scale)
    if torch.onnx.is_in_onnx_export():
        attributes = {"num_heads": heads, "scale": float(scale)}
        fused: torch.Tensor = torch.onnx.ops.symbolic(
            f"{CONTRIB}::MultiHeadAttention", joined, attributes, dtype=query.dtype, shape=joined[0].shape, version=1
        )
        return fused
    by_head = [part.transpose(1, 2) for part in (query, key, value)]
    attended = torch.nn.functional.scaled_dot_product_attention(*by_head, scale=scale)
    return attended.transpose(1, 2).flatten(2)


def _chain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    kind = torch.float16 if _form.get() == "half" else query.dtype
    q, k, v = (part.transpose(1, 2).to(kind) for part in (query * scale, key, value))
    across, attended = k.transpose(2, 3), []
    for start in range(0, q.shape[2], QUERIES):
        weights = torch.softmax(q[:, :, start : start + QUERIES] @ across, -1)
        attended.append(weights @ v)
    joined = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
    return joined.transpose(1, 2).flatten(2).to(query.dtype)


def use_in(model: Any) -> None:
    """Make a tower of transformers attend so."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _interface)
    model.config._attn_implementation = NAME


def _interface(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls, with ``[batch, heads, N, head_dim]``, for ``[batch, N, heads, head_dim]``."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return attend(query, key, value, scaling).unflatten(2, query.shape[2:]), None

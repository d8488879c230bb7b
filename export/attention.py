"""Full attention of a vision tower: in the graph one fused node, which never holds the scores of all pairs at once."""

from __future__ import annotations

from typing import Any

import torch

from edgevlm.export.graph import CONTRIB

NAME = "edgevlm"


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """``softmax(scale * q k') v`` of ``[batch, N, heads, head_dim]`` each: ``[batch, N, heads * head_dim]``."""
    heads, joined = query.shape[2], [part.flatten(2) for part in (query, key, value)]
    if torch.onnx.is_in_onnx_export():
        attributes = {"num_heads": heads, "scale": float(scale)}
        fused: torch.Tensor = torch.onnx.ops.symbolic(
            f"{CONTRIB}::MultiHeadAttention", joined, attributes, dtype=query.dtype, shape=joined[0].shape, version=1
        )
        return fused
    by_head = [part.transpose(1, 2) for part in (query, key, value)]
    attended = torch.nn.functional.scaled_dot_product_attention(*by_head, scale=scale)
    return attended.transpose(1, 2).flatten(2)


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

"""Attention for packed questions: vision tokens attend causally, question tokens by a mask, a kernel call each.

Half the work of one masked attention, because the vision part needs no mask and skips what lies ahead.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    asked_of: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, V + Q, D], key and value [B, Hkv, V + Q, D], attention_mask bool [B, 1, Q, V + Q].

    The mask is for the last Q rows. Returns [B, V + Q, Hq, D], as transformers wants it. `asked_of`
    collects what the first KV head is asked in each layer: its queries [B, Hq / Hkv, Q, D] and keys [B, V + Q, D].
    """
    vision = query.shape[2] - attention_mask.shape[2]
    if asked_of is not None:
        asked_of.append((query[:, : module.num_key_value_groups, vision:], key[:, 0]))
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    seen = scaled_dot_product_attention(query[:, :, :vision], key[:, :, :vision], value[:, :, :vision], is_causal=True)
    asked = scaled_dot_product_attention(query[:, :, vision:], key, value, attn_mask=attention_mask)
    return torch.cat([seen, asked], dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("edgevlm_packed", packed_attention)

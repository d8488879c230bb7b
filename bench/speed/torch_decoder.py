"""Run transformers' decoder in float32 with a DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from edgevlm.bench.seeded import TextModel

KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class TorchDecoder:
    """transformers as a :class:`~edgevlm.bench.speed.runtimes.Runtime`. The KV cache is filled with noise."""

    def __init__(self, model: TextModel, precision: str, threads: int, capacity: int, kv: str) -> None:
        if (precision, kv) != ("fp32", "fp32"):
            raise ValueError(f"transformers is supported only in fp32, not {precision} with {kv} keys and values")
        torch.set_num_threads(threads)
        self._shape, self._model, self._appended = model.shape, load(model), 0
        self._cache: Any = None

    def hold(self, rows: int) -> None:
        s = self._shape
        self._cache = transformers.DynamicCache()
        for layer in range(s.layers if rows else 0):
            self._cache.update(*torch.randn(2, 1, s.kv_heads, rows, s.head_dim), layer)

    def append(self, ids: Sequence[int], scores: bool = True) -> NDArray[np.float32] | None:
        model = self._model if scores else self._model.model
        self._appended = len(ids)
        keep = {"logits_to_keep": 1} if scores else {}
        with torch.inference_mode():
            out = model(torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True, **keep)
        return out.logits[0, -1].numpy() if scores else None

    def forget(self) -> None:
        self._cache.crop(-self._appended)

    def close(self) -> None:
        del self._model, self._cache


def load(model: TextModel) -> Any:
    s, kind = model.shape, KINDS[model.backbone]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, rms_norm_eps=s.norm_eps,
        max_position_embeddings=s.model_limit, tie_word_embeddings=s.tied,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
    )  # fmt: skip
    if kind == "Llama":
        config.attention_bias, config.mlp_bias = "o" in s.biases, "down" in s.biases
    decoder = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    wanted = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    if s.tied:
        del wanted["lm_head.weight"]
    state = {name: torch.from_numpy(model.tensors.tensor(_canonical(name), shape)) for name, shape in wanted.items()}
    decoder.load_state_dict(state, strict=not s.tied, assign=True)
    if s.tied:
        decoder.tie_weights()
    return decoder


def _canonical(name: str) -> str:
    return f"text.{name.removeprefix('model.')}"

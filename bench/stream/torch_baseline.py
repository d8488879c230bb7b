"""Run InfiniPot-V in PyTorch on transformers, like its authors' program, as the baseline of ``bench stream against``.

A chunk of frames is encoded and appended to a DynamicCache. When the cache would exceed the budget, TaR and value norms (arXiv
2506.15745, Alg. 1) choose the tokens to keep, which are copied to new tensors. With ``p`` tokens per frame, the i-th oldest
token counts as patch ``i % p``. Keys are compared after rotation. The batch size is 1.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

ALPHA, TARGET, RECENT = 0.5, 0.75, 0.25


def load(checkpoint: Path, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a LLaVA-OneVision checkpoint into transformers. ``attention``: ``eager`` or ``sdpa``."""
    kind = transformers.LlavaOnevisionForConditionalGeneration
    return kind.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention, local_files_only=True).eval()


class TorchBaseline:
    """A stream and its cache. ``stops``: the tokens that end an answer."""

    def __init__(self, model: Any, prefix: Sequence[int], budget: int, per_frame: int, stops: Collection[int]) -> None:
        self._model, self._decoder, self._stops = model, model.model.language_model, stops
        self._budget, self._per_frame = budget, per_frame
        self._cache, self._prefix, self._position = transformers.DynamicCache(), len(prefix), 0
        self.parts_ms, self.compressions = {"vision_ms": 0.0, "prefill_ms": 0.0, "compress_ms": 0.0}, 0
        self._append(self._embedded(prefix))

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's rotated keys and its values, each ``[kv_heads, n, head_dim]``, oldest first."""
        kept = self._cache.layers[layer]
        return kept.keys[0], kept.values[0]

    @torch.inference_mode()
    def watch(self, pixels: Tensor) -> None:
        """Watch normalised frames ``[F, 3, H, W]``."""
        begun = time.perf_counter()
        video = pixels[None].to(self._model.dtype)
        features = self._model.model.get_video_features(video, return_dict=True).pooler_output[0, :-1]
        self.parts_ms["vision_ms"] += 1e3 * (time.perf_counter() - begun)
        step = (self._budget - target_of(self._budget, self._per_frame)) // self._per_frame
        while len(features):
            begun = time.perf_counter()
            free = (self._budget + self._prefix - self._cache.get_seq_length()) // self._per_frame
            rows = self._per_frame * (free or step)
            piece, features = features[:rows], features[rows:]
            if not free:
                self._compress()
            compressed = time.perf_counter()
            self._append(piece)
            self.parts_ms["compress_ms"] += 1e3 * (compressed - begun)
            self.parts_ms["prefill_ms"] += 1e3 * (time.perf_counter() - compressed)

    @torch.inference_mode()
    def ask(self, ids: Sequence[int], most: int) -> tuple[list[int], float, float]:
        """Answer greedily without changing the memory; return the tokens, ms to the first token and ms per further token."""
        before, position = self._cache.get_seq_length(), self._position
        said, times = list[int](), [time.perf_counter()]
        embeds = torch.cat([self._model.model.image_newline[None], self._embedded(ids)])
        while len(said) < most:
            token = int(self._model.lm_head(self._append(embeds)[-1]).argmax())
            times.append(time.perf_counter())
            if token in self._stops:
                break
            said.append(token)
            embeds = self._embedded([token])
        self._cache.crop(before - self._cache.get_seq_length())
        self._position = position
        further = len(said) - 1
        return said, 1e3 * (times[1] - times[0]), 1e3 * (times[len(said)] - times[1]) / further if further > 0 else 0.0

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            rows: Tensor = self._decoder.embed_tokens(torch.tensor(ids))
        return rows

    def _append(self, embeds: Tensor) -> Tensor:
        """Run rows ``[S, hidden]`` through the decoder and return its output. Evictions do not affect positions."""
        at = torch.arange(self._position, self._position + len(embeds))[None]
        self._position += len(embeds)
        with torch.inference_mode():
            out = self._decoder(inputs_embeds=embeds[None], position_ids=at, past_key_values=self._cache, use_cache=True)
        rows: Tensor = out.last_hidden_state[0]
        return rows

    def _compress(self) -> None:
        self.compressions += 1
        for layer, held in enumerate(self._cache.layers):
            keys, values = self.held(layer)
            kept = chosen(keys[:, self._prefix :], values[:, self._prefix :], self._budget, self._per_frame)
            fixed = torch.arange(self._prefix).expand(len(kept), -1)
            everywhere = torch.cat([fixed, kept + self._prefix], 1)[..., None].expand(-1, -1, keys.shape[-1])
            held.keys, held.values = keys.gather(1, everywhere)[None], values.gather(1, everywhere)[None]


def target_of(budget: int, per_frame: int) -> int:
    """Return how many tokens a compression keeps: whole frames only, at least one fewer than fit in the budget."""
    return min(int(TARGET * budget) // per_frame, budget // per_frame - 1) * per_frame


def chosen(keys: Tensor, values: Tensor, budget: int, per_frame: int) -> Tensor:
    """Return the indices of the tokens to keep, int64 ``[kv_heads, target]``, ascending.

    ``keys``, ``values``: ``[kv_heads, n, head_dim]``, oldest first. n is a multiple of ``per_frame``.
    """
    count, target = keys.shape[1], target_of(budget, per_frame)
    new = per_frame * max(1, int(RECENT * (count // per_frame)))
    unit = (keys / (keys.norm(dim=-1, keepdim=True) + 1e-9)).unflatten(1, (-1, per_frame))
    old, recent = unit[:, : -new // per_frame], unit[:, -new // per_frame :]
    likeness = torch.einsum("hfpd,hpd->hfp", old, recent.mean(1)).flatten(1)
    score = values.norm(dim=-1)
    score[:, count - new :] = torch.inf
    quota = max(0, target - round((1 - ALPHA) * target) - new)
    score.scatter_(1, likeness.topk(min(quota, count - new), 1, largest=False).indices, torch.inf)
    return score.topk(target, 1).indices.sort(1).values

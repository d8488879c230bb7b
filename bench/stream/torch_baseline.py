"""InfiniPot-V in plain PyTorch over transformers, as its authors' program goes: what ``bench stream against`` runs beside us.

A chunk of frames is encoded and appended to a DynamicCache; when more than the budget is held, TaR and VaN choose what stays
(arXiv 2506.15745, Alg. 1, as ``infinipot-v:mode=official`` has it: the i-th oldest token stands for patch ``i % p``, keys are
compared rotated), the rest is gathered into new tensors, and keys are rotated to dense positions. Batch 1, float32.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import avg_pool1d, avg_pool2d

ALPHA, TARGET, RECENT = 0.5, 0.75, 0.125


def load(checkpoint: Path, attention: str) -> Any:
    """A LLaVA-OneVision checkpoint as transformers runs it, float32. attention: ``eager`` or ``sdpa``."""
    kind = transformers.LlavaOnevisionForConditionalGeneration
    return kind.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation=attention, local_files_only=True).eval()


class TorchBaseline:
    """One stream. ``rows``: of a frame's grid; ``stops``: tokens that end an answer."""

    def __init__(
        self, model: Any, prefix: Sequence[int], budget: int, per_frame: int, rows: int, stops: Collection[int]
    ) -> None:
        self._model, self._decoder, self._stops = model, model.model.language_model, stops
        self._budget, self._per_frame, self._rows = budget, per_frame, rows
        self._cache, self._prefix = transformers.DynamicCache(), len(prefix)
        self.parts_ms, self.compressions = {"vision": 0.0, "prefill": 0.0, "compress": 0.0}, 0
        self._append(self._embedded(prefix))

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values ``[kv_heads, n, head_dim]``, the prefix first, then oldest first."""
        kept = self._cache.layers[layer]
        return kept.keys[0], kept.values[0]

    @torch.inference_mode()
    def watch(self, pixels: Tensor) -> None:
        """Take in frames ``[F, 3, H, W]``, normalised."""
        begun = time.perf_counter()
        features = self._model.model.get_video_features(pixels[None], return_dict=True).pooler_output[0, :-1]
        encoded = time.perf_counter()
        self._append(features)
        appended = time.perf_counter()
        if self._cache.get_seq_length() - self._prefix > self._budget:
            self._compress()
        done = time.perf_counter()
        for part, seconds in (("vision", encoded - begun), ("prefill", appended - encoded), ("compress", done - appended)):
            self.parts_ms[part] += 1e3 * seconds

    @torch.inference_mode()
    def ask(self, ids: Sequence[int], most: int) -> tuple[list[int], float, float]:
        """Greedy tokens after the memory, ms to the first and ms for each further one; the memory is then as it was."""
        before, said, times = self._cache.get_seq_length(), list[int](), [time.perf_counter()]
        embeds = torch.cat([self._model.model.image_newline[None], self._embedded(ids)])
        while len(said) < most:
            token = int(self._model.lm_head(self._append(embeds)[-1]).argmax())
            times.append(time.perf_counter())
            if token in self._stops:
                break
            said.append(token)
            embeds = self._embedded([token])
        self._cache.crop(before - self._cache.get_seq_length())
        further = len(said) - 1
        return said, 1e3 * (times[1] - times[0]), 1e3 * (times[len(said)] - times[1]) / further if further > 0 else 0.0

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            rows: Tensor = self._decoder.embed_tokens(torch.tensor(ids))
        return rows

    def _append(self, embeds: Tensor) -> Tensor:
        """Rows ``[S, hidden]`` through the decoder; what it makes of them. Positions go on from how many rows are held."""
        with torch.inference_mode():
            out = self._decoder(inputs_embeds=embeds[None], past_key_values=self._cache, use_cache=True)
        rows: Tensor = out.last_hidden_state[0]
        return rows

    def _compress(self) -> None:
        self.compressions += 1
        for layer, held in enumerate(self._cache.layers):
            keys, values = self.held(layer)
            quarter = 4 * layer // len(self._cache.layers)
            kept = chosen(
                keys[:, self._prefix :], values[:, self._prefix :], self._budget, self._per_frame, self._rows, quarter
            )
            fixed = torch.arange(self._prefix).expand(len(kept), -1)
            rows = torch.cat([fixed, kept + self._prefix], 1)
            moved = torch.arange(rows.shape[1]) - rows  # a row's position is its place, before and after
            everywhere = rows[..., None].expand(-1, -1, keys.shape[-1])
            held.keys = rotated(keys.gather(1, everywhere), moved, self._decoder.rotary_emb.inv_freq)[None]
            held.values = values.gather(1, everywhere)[None]


def chosen(keys: Tensor, values: Tensor, budget: int, per_frame: int, rows: int, quarter: int) -> Tensor:
    """Places that stay, rising, int64 ``[kv_heads, target]``; keys and values ``[kv_heads, n, head_dim]``, oldest first.

    n: whole frames of ``per_frame`` tokens, in ``rows`` rows. quarter: of the depth. Which of equals stays is left open, where
    our policy takes the newer: pooled norms are equal only on grids so small that a window covers them.
    """
    count = keys.shape[1]
    target = max(1, int(TARGET * budget + 1e-9) // per_frame) * per_frame
    new = per_frame * max(1, int(RECENT * (count // per_frame) + 1e-9))
    unit = (keys / (keys.norm(dim=-1, keepdim=True) + 1e-9)).unflatten(1, (-1, per_frame))
    old, recent = unit[:, : -new // per_frame], unit[:, -new // per_frame :]
    likeness = torch.einsum("hfpd,hpd->hfp", old, recent.mean(1)).flatten(1)
    score = pooled(values.norm(dim=-1), per_frame, rows, quarter)
    score[:, count - new :] = torch.inf
    quota = max(0, target - round((1 - ALPHA) * target) - new)
    score.scatter_(1, likeness.topk(min(quota, count - new), 1, largest=False).indices, torch.inf)
    return score.topk(target, 1).indices.sort(1).values


def pooled(norms: Tensor, per_frame: int, rows: int, quarter: int) -> Tensor:
    """VaN ``[kv_heads, n]``: means over 7 x 7 and 5 x 5 patches, over 3 tokens, and none; zeros outside."""
    if quarter == 3:
        return norms
    if quarter == 2:
        return avg_pool1d(norms, 3, 1, 1)
    size = (7, 5)[quarter]
    return avg_pool2d(norms.unflatten(1, (-1, rows, per_frame // rows)), size, 1, size // 2).flatten(1)


def rotated(keys: Tensor, by: Tensor, inv_freq: Tensor) -> Tensor:
    """Keys ``[kv_heads, n, head_dim]`` rotated ``by`` so many positions ``[kv_heads, n]``, halves of a head paired."""
    angle = by[..., None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

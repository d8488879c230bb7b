"""A slow, readable Qwen2-style decoder in numpy, with a cache that any row can leave: the oracle for evicting caches.

Every layer and KV head keeps its own rows: un-rotated keys, values, rotary positions and sequence numbers. Keys are
rotated when they are used, so re-positioning is an assignment and evicting is an index. Nothing is shared with edgevlm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[Any]
Sees = Callable[[int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""``sees(layer, new [S, 1], cached [1, n])``: which rows may look at which, all named by ``seq``; broadcast to ``[S, n]``."""


START = 3  # the first layer that prefills sparsely


@dataclass
class HeadCache:
    """The rows of one layer's KV head, in the order in which they came."""

    keys: Array  # (n, head_dim), not rotated
    values: Array  # (n, head_dim)
    positions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,)
    seq: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,), the row's place in the stream

    def append(self, keys: Array, values: Array, positions: Array, seq: Array) -> None:
        self.keys = np.concatenate([self.keys, keys])
        self.values = np.concatenate([self.values, values])
        self.positions = np.concatenate([self.positions, positions])
        self.seq = np.concatenate([self.seq, seq])

    def keep(self, rows: Sequence[int] | Array) -> None:
        """Keep only ``rows`` (indices), in the order given."""
        index = np.asarray(rows, np.int64)
        self.keys, self.values = self.keys[index], self.values[index]
        self.positions, self.seq = self.positions[index], self.seq[index]

    def __len__(self) -> int:
        return len(self.keys)


class ReferenceDecoder:
    """The language model of a LLaVA-style checkpoint folder, as ``save_pretrained`` writes it.

    ``cache[layer][kv_head]`` is a :class:`HeadCache`; take rows out with ``keep``, move them with ``positions``.
    """

    def __init__(self, folder: str | Path, dtype: Any = np.float64) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        text = config["text_config"]
        self.dtype = dtype
        self.layers, self.heads = text["num_hidden_layers"], text["num_attention_heads"]
        self.kv_heads = text.get("num_key_value_heads") or self.heads
        self.head_dim = text.get("head_dim") or text["hidden_size"] // self.heads
        self.eps = text["rms_norm_eps"]
        theta = (text.get("rope_parameters") or text)["rope_theta"]
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        self.inv_freq = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
        self.weights = _text_weights(Path(folder), dtype)
        tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        self.head = self.weights["embed_tokens.weight" if tied else "lm_head.weight"]
        self.reset()

    def reset(self) -> None:
        """An empty cache."""
        none = np.zeros((0, self.head_dim), self.dtype)
        self.cache = [[HeadCache(none, none) for _ in range(self.kv_heads)] for _ in range(self.layers)]
        self.count = 0

    def embed(self, token_ids: Sequence[int]) -> Array:
        """Embeddings ``[n, hidden]``."""
        return self.weights["embed_tokens.weight"][np.asarray(token_ids, np.int64)]

    def append(self, embeds: Array, positions: Sequence[int] | Array, sees: Sees | None = None) -> Array:
        """Append rows ``[S, hidden]`` at ``positions [S]`` to every layer; returns their logits ``[S, vocab]``.

        A new row sees every cached row of its head, whatever its position, and the new rows up to itself, or of these only
        what ``sees`` lets it.
        """
        positions = np.asarray(positions, np.int64)
        seq = np.arange(self.count, self.count + len(embeds))
        hidden = np.asarray(embeds, self.dtype)
        for layer in range(self.layers):
            hidden = hidden + self._attention(layer, hidden, positions, seq, sees)
            hidden = hidden + self._mlp(layer, hidden)
        self.count += len(embeds)
        return self._norm(hidden, "norm") @ self.head.T

    def greedy(self, logits: Array, position: int, count: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """Up to ``count`` greedy tokens, the first chosen by ``logits [vocab]``, the next row at ``position``."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(int(np.argmax(logits)))
            if tokens[-1] in stop_ids:
                break
            logits = self.append(self.embed(tokens[-1:]), [position])[-1]
            position += 1
        return tokens

    def _attention(self, layer: int, hidden: Array, positions: Array, seq: Array, sees: Sees | None = None) -> Array:
        """``[S, hidden]`` to ``[S, hidden]``; appends to the layer's cache."""
        normed = self._norm(hidden, f"layers.{layer}.input_layernorm")
        query = self._heads(layer, "q", normed)  # (heads, S, head_dim)
        key, value = self._heads(layer, "k", normed), self._heads(layer, "v", normed)  # (kv_heads, S, head_dim)
        rows, group = len(hidden), self.heads // self.kv_heads
        outputs = []
        for kv_head in range(self.kv_heads):
            cache = self.cache[layer][kv_head]
            cache.append(key[kv_head], value[kv_head], positions, seq)
            keys = self._rotate(cache.keys, cache.positions)
            hidden_from = np.arange(len(cache))[None, :] > (len(cache) - rows + np.arange(rows))[:, None]
            if sees is not None:
                hidden_from = hidden_from | ~sees(layer, seq[:, None], cache.seq[None, :])
            for head in range(kv_head * group, (kv_head + 1) * group):
                scores = self._rotate(query[head], positions) @ keys.T / np.sqrt(self.head_dim)  # (S, n)
                scores = np.where(hidden_from, -np.inf, scores)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                outputs.append(weights / weights.sum(1, keepdims=True) @ cache.values)
        joined = np.concatenate(outputs, axis=1)  # (S, heads * head_dim)
        return joined @ self.weights[f"layers.{layer}.self_attn.o_proj.weight"].T

    def _mlp(self, layer: int, hidden: Array) -> Array:
        normed = self._norm(hidden, f"layers.{layer}.post_attention_layernorm")
        gate, up, down = (self.weights[f"layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = normed @ gate.T
        return (gated / (1 + np.exp(-gated)) * (normed @ up.T)) @ down.T

    def _heads(self, layer: int, part: str, normed: Array) -> Array:
        name = f"layers.{layer}.self_attn.{part}_proj"
        rows = normed @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return rows.reshape(len(rows), -1, self.head_dim).transpose(1, 0, 2)

    def _rotate(self, rows: Array, positions: Array) -> Array:
        """Rotate-half by ``positions``; the angle is float32, as transformers has it."""
        angle = positions.astype(np.float32)[:, None] * self.inv_freq
        cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        half = self.head_dim // 2
        first, second = rows[:, :half], rows[:, half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    def _norm(self, hidden: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(hidden * hidden, axis=-1, keepdims=True) + self.eps)
        return hidden / scale * self.weights[f"{name}.weight"]


class Shadow:
    """Does to a ReferenceDecoder what a stream does to its cache, and gives it the mask when the stream prefills sparsely."""

    def __init__(self, checkpoint, stream, prefix_ids):
        self.decoder, self.stream = ReferenceDecoder(checkpoint), stream
        self.per_frame = stream.model.bundle.vision.tokens_per_frame
        self.reindexed, self.errors, self.choices, self.sparse_frames, self.dense_rows = 0, [], [], [], []
        self.decoder.append(stream.model.engine.embed(np.array(prefix_ids)), np.arange(len(prefix_ids)))
        self.before_append, stream.policy.before_append = stream.policy.before_append, self._before_append
        stream.decoder.step = self._watched(stream.decoder.step)

    def _before_append(self, cache, rows, *others):
        plan = self.before_append(cache, rows, *others)
        for layer, mask in enumerate(plan.keep if plan else []):
            for head in range(cache.kv_heads if mask is not None else 0):
                rows_of = self.decoder.cache[layer][head]
                rows_of.keep(np.flatnonzero(np.isin(rows_of.seq, cache.seq(layer)[head][mask[head]])))
        return plan

    def _watched(self, step):
        def watched(embeds, cos, sin, past_len, logit_rows=(-1,), pattern=None, **others):
            if self.stream.stats.reindexings > self.reindexed:
                self.reindexed = self.stream.stats.reindexings
                self.make_dense()
            first = self.stream.positions.next - len(embeds)  # already taken for these rows
            self.decoder.count = self.stream._seq
            sees = None if pattern is None else self.sees
            logits = self.decoder.append(embeds, np.arange(first, first + len(embeds)), sees)
            (self.dense_rows if pattern is None else self.sparse_frames).append(len(embeds))
            result = step(embeds, cos, sin, past_len, logit_rows, pattern, **others)
            if len(result.logits):
                self.choices.append(int(np.argmax(logits[-1])))
                self.errors.append(float(np.abs(logits[-1] - result.logits[-1]).max()))
            return result

        return watched

    def sees(self, layer, new, cached):
        """Vision rows follow the prefix without a gap in ``seq``: a question's rows give theirs back."""
        p, prefix = self.per_frame, self.stream.prefix
        if layer < START:
            return np.ones((1, 1), bool)
        return (cached < prefix + p) | ((new - prefix) // p == (cached - prefix) // p) | (cached == new - p)

    def make_dense(self):
        for head in (head for layer in self.decoder.cache for head in layer):
            moved = head.positions >= self.stream.prefix
            head.positions[moved] = self.stream.prefix + np.argsort(np.argsort(head.positions[moved]))

    def forget(self, rows):
        """The last rows of every head: a question is over."""
        for head in (head for layer in self.decoder.cache for head in layer):
            head.keep(range(len(head) - rows))


def _text_weights(folder: Path, dtype: Any) -> dict[str, Array]:
    """The language model's tensors, named from ``embed_tokens``, ``layers``, ``norm`` and ``lm_head``."""
    weights: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if "language_model." in name or name.startswith("lm_head"):
                    short = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
                    weights[short] = tensors.get_tensor(name).float().numpy().astype(dtype)
    return weights

"""The kernels in vectorised numpy, float32: what a policy would cost without C++. tests/reference.py has plain float64 ones.

:func:`in_place` puts them where policies look for the kernels, so that one policy file is measured both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind

Array = Any


def _turned_back(key: Array, position: Array, inv_freq: Array, pair_axis: Array | None) -> Array:
    axis = np.zeros(len(inv_freq), np.uint8) if pair_axis is None else pair_axis
    angle = position[:, axis] * inv_freq
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = np.split(key.astype(np.float32), 2, axis=-1)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def _numbers(stored: Array, scale: Array | None) -> Array:
    """Rows as float32, whatever they are stored as."""
    return stored.astype(np.float32) if scale is None else stored * scale[:, None]


def temporal_similarity(
    key: Array, position: Array, row: Array, col: Array, recent: Array, valid: Array, inv_freq: Array,
    *, rotated: bool = False, pair_axis: Array | None = None, scale: Array | None = None,
) -> Array:  # fmt: skip
    """Means of unit keys by patch with ``np.add.at``, then one product with every past key."""
    out, key = np.zeros(valid.shape, np.float32), _numbers(key, scale)
    for head in range(len(key)):
        keys = key[head] if rotated else _turned_back(key[head], position[head], inv_freq, pair_axis)
        keys = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), np.float32(1e-30))
        patch = np.unique(row[head].astype(np.int64) << 16 | col[head].astype(np.int64) & 0xFFFF, return_inverse=True)[1]
        new, past = valid[head] & recent[head], valid[head] & ~recent[head]
        mean, count = (
            np.zeros((patch.max(initial=-1) + 1, keys.shape[1]), np.float32),
            np.bincount(patch[new], minlength=len(patch)),
        )
        np.add.at(mean, patch[new], keys[new])
        cosine = np.einsum("nd,nd->n", keys[past], mean[patch[past]]) / np.maximum(count[patch[past]], 1)
        out[head, past] = np.where(count[patch[past]] > 0, cosine, -1)
    return out


def value_norms(value: Array, scale: Array | None = None) -> Array:
    return np.linalg.norm(_numbers(value, scale), axis=-1)


def infinipot_scores(cache: Any, recent: Sequence[Array], valid: Sequence[Array], *, rotated: bool = False) -> list[tuple]:
    return [
        (
            temporal_similarity(
                cache.key(layer), cache.position(layer), cache.row(layer), cache.col(layer), recent[layer], valid[layer],
                cache.inv_freq, rotated=rotated, pair_axis=cache.pair_axis, scale=cache.key_scale(layer),
            ),
            value_norms(cache.value(layer), cache.value_scale(layer)),
        )
        for layer in range(cache.layers)
    ]  # fmt: skip


def newer_similarity(cache: Any, layer: int, valid: Array, since: int = 0, *, rotated: bool = False) -> Array:
    """512 tokens with all newer ones at a time."""
    out, key = np.zeros(valid.shape, np.float32), cache.numbers("key", layer)
    position, seq = cache.position(layer), cache.seq(layer)
    for head, mine in enumerate(valid):
        rows = np.flatnonzero(mine)[np.argsort(seq[head, mine])]
        turned = key[head, rows]
        if not rotated:
            turned = _turned_back(turned, position[head, rows], cache.inv_freq, cache.pair_axis)
        unit = turned / np.maximum(np.linalg.norm(turned, axis=-1, keepdims=True), np.float32(1e-30))
        news = int(np.searchsorted(seq[head, rows], since))
        for first in range(0, len(rows), 512):
            start = max(first, news)
            cosine = unit[first : first + 512] @ unit[start:].T
            cosine[np.tri(len(cosine), len(rows) - start, first - start, dtype=np.bool_)] = -1
            out[head, rows[first : first + 512]] = cosine.max(1, initial=-1)
    return out


def pool_norms(norms: Array, frame: Array, row: Array, col: Array, valid: Array, window: int) -> Array:
    """Every frame of a head on one grid, with shifted copies added up."""
    out, reach = np.zeros(valid.shape, np.float32), window // 2
    for head in range(len(norms)):
        at = valid[head]
        if not at.any():
            continue
        t = np.unique(frame[head, at], return_inverse=True)[1]
        i, j = (part[head, at] - part[head, at].min() + reach for part in (row.astype(int), col.astype(int)))
        total = np.zeros((t.max() + 1, i.max() + 1 + reach, j.max() + 1 + reach))
        count = np.zeros(total.shape, np.int32)
        np.add.at(total, (t, i, j), norms[head, at])
        np.add.at(count, (t, i, j), 1)
        steps = [(down, across) for down in range(-reach, reach + 1) for across in range(-reach, reach + 1)]
        near = sum(total[t, i + down, j + across] for down, across in steps)
        out[head, at] = near / sum(count[t, i + down, j + across] for down, across in steps)
    return out


def infinipot_select(
    cache: Any, recent_frames: int, distinctive: int, target: int, windows: Sequence[int], thresholds: Sequence[float] = (),
    *, keep_recent: bool = True, rotated: bool = False,
) -> list[Array]:  # fmt: skip
    """Layer by layer, of the functions above and below."""
    vision = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
    recent = [newest_frames(cache.frame(layer), held, recent_frames) for layer, held in enumerate(vision)]
    keep = []
    for layer, (similarity, norms) in enumerate(infinipot_scores(cache, recent, vision, rotated=rotated)):
        seq, new, held = cache.seq(layer), recent[layer], vision[layer]
        chosen = top_k(-similarity, seq, held & ~new, distinctive) | (new & keep_recent)
        if len(thresholds):
            spread = norms[held].std(dtype=np.float64) / norms[held].mean(dtype=np.float64)
            window = (7, 5, 3, 1)[int(np.searchsorted(thresholds, spread, side="right"))]
        else:
            window = windows[layer]
        pooled = pool_norms(norms, cache.frame(layer), cache.row(layer), cache.col(layer), held, window)
        keep.append(top_k(np.where(chosen, np.float32(np.inf), pooled), seq, held, target) | (cache.kind(layer) == Kind.PREFIX))
    return keep


def top_k(scores: Array, seq: Array, candidates: Array, k: int) -> Array:
    """A whole sort of each head."""
    out = np.zeros(candidates.shape, np.bool_)
    for head in range(len(scores)):
        rows = np.flatnonzero(candidates[head])
        score = scores[head, rows]
        order = np.lexsort((rows, -seq[head, rows], -np.nan_to_num(score, nan=-np.inf, posinf=np.inf, neginf=-np.inf)))
        out[head, rows[order[:k]]] = True
    return out


def index_of(seq: Array, known: Array) -> Array:
    """A whole sort of each head's ``known``."""
    out = np.full(seq.shape, -1, np.int32)
    for head, wanted in enumerate(seq):
        order = np.argsort(known[head], kind="stable")
        if len(order):
            at = order[np.minimum(np.searchsorted(known[head], wanted, sorter=order), len(order) - 1)]
            out[head] = np.where(known[head, at] == wanted, at, -1)
    return out


def attention_mass(
    query: Array, query_seq: Array, key: Array, seq: Array, own_key: Array = None, own_seq: Array = None, scale: Array = None
) -> Array:
    """One product, one softmax over all of it."""
    held, key = key.shape[1], _numbers(key, scale)
    if own_key is not None:
        key, seq = (
            np.concatenate([key, own_key], 1),
            np.concatenate([seq, np.broadcast_to(own_seq, (len(key), len(own_seq)))], 1),
        )
    heads, rows, width = query.shape
    kv_heads = len(key)
    grouped = query.reshape(kv_heads, heads // kv_heads * rows, width) * np.float32(width**-0.5)
    scores = np.matmul(grouped, key.transpose(0, 2, 1))  # [kv_heads, group * rows, n]
    scores[seq[:, None, :] > np.tile(query_seq, heads // kv_heads)[None, :, None]] = -np.inf
    scores -= scores.max(2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(2, keepdims=True)
    return scores.sum(1, dtype=np.float32)[:, :held]


def newest_frames(frame: Array, among: Array, count: int) -> Array:
    return among & np.isin(frame, np.unique(frame[among])[-count:] if count else [])


def evict(arrays: Sequence[Array], keep: Array) -> list[Array]:
    """What is left of arrays ``[H, n, ...]``: the k-th hole among the first m rows takes the k-th kept row behind them."""
    kept = int(keep[0].sum())
    left = [array[:, :kept].copy() for array in arrays]
    for head, mine in enumerate(keep):
        holes, survivors = np.flatnonzero(~mine[:kept]), kept + np.flatnonzero(mine[kept:])
        for out, array in zip(left, arrays, strict=True):
            out[head, holes] = array[head, survivors]
    return left


KERNELS = {
    "temporal_similarity": temporal_similarity,
    "value_norms": value_norms,
    "infinipot_scores": infinipot_scores,
    "infinipot_select": infinipot_select,
    "newer_similarity": newer_similarity,
    "pool_norms": pool_norms,
    "attention_mass": attention_mass,
    "top_k": top_k,
    "index_of": index_of,
    "newest_frames": newest_frames,
}


@contextmanager
def in_place() -> Iterator[None]:
    """Policies use these kernels inside."""
    native = {name: getattr(kernels, name) for name in KERNELS}
    try:
        for name, kernel in KERNELS.items():
            setattr(kernels, name, kernel)
        yield
    finally:
        for name, kernel in native.items():
            setattr(kernels, name, kernel)

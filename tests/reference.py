"""Slow, plain float64 twins of the kernels and of what the cache does, to test those against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Int = NDArray[np.integer]


def rotate(
    x: NDArray[np.floating], position: Int | int, inv_freq: Float64, pair_axis: NDArray[np.uint8] | None = None
) -> Float64:
    """Turn ``x [..., D]`` by ``position [...]``: rotate-half pairs ``(d, d + D / 2)``, as Hugging Face has it.

    With ``pair_axis [D / 2]`` the positions are ``[..., axes]``, and each pair turns by the axis it names (M-RoPE).
    """
    if pair_axis is None:
        angle = np.asarray(position, np.float64)[..., None] * inv_freq
    else:
        angle = np.asarray(position, np.float64)[..., pair_axis] * inv_freq
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _unit(x: Float64) -> Float64:
    length = np.linalg.norm(x)
    return x / length if length > 0 else np.zeros_like(x)


def temporal_similarity(
    key: NDArray[np.floating],
    position: NDArray[np.int32],
    row: NDArray[np.int16],
    col: NDArray[np.int16],
    recent: Bool,
    valid: Bool,
    inv_freq: Float64,
    *,
    rotated: bool = False,
    pair_axis: NDArray[np.uint8] | None = None,
) -> Float64:
    """InfiniPot-V eq. 4 before its sign; arguments and result as in :mod:`edgevlm.runtime.kernels`."""
    out = np.zeros(valid.shape)
    for head in range(len(key)):
        if rotated:
            keys = key[head].astype(np.float64)
        elif pair_axis is None:
            keys = rotate(key[head], -position[head, :, 0], inv_freq)
        else:
            keys = rotate(key[head], -position[head], inv_freq, pair_axis)
        for t in np.flatnonzero(valid[head] & ~recent[head]):
            same_patch = (row[head] == row[head, t]) & (col[head] == col[head, t])
            counterparts = np.flatnonzero(valid[head] & recent[head] & same_patch)
            cosines = [_unit(keys[t]) @ _unit(keys[r]) for r in counterparts]
            out[head, t] = np.mean(cosines) if cosines else -1.0
    return out


def value_norms(value: NDArray[np.floating]) -> Float64:
    """L2 norms ``[H, n]`` of ``[H, n, D]``."""
    return np.sqrt(np.square(value.astype(np.float64)).sum(-1))


def pool_norms(
    norms: NDArray[np.floating],
    frame: NDArray[np.int32],
    row: NDArray[np.int16],
    col: NDArray[np.int16],
    valid: Bool,
    window: int,
) -> Float64:
    """InfiniPot-V's VaN pooling: the mean over the neighbours that are there, each frame by itself."""
    reach = window // 2
    out = np.zeros(valid.shape)
    for head, t in np.argwhere(valid):
        down = np.abs(row[head].astype(int) - row[head, t]) <= reach
        across = np.abs(col[head].astype(int) - col[head, t]) <= reach
        near = valid[head] & (frame[head] == frame[head, t]) & down & across
        out[head, t] = norms[head, near].astype(np.float64).mean()
    return out


def top_k(scores: NDArray[np.floating], seq: NDArray[np.int64], candidates: Bool, k: int) -> Bool:
    """The k best candidates of each head: by score (NaN last), then by newer ``seq``, then by lower row."""
    out = np.zeros(candidates.shape, np.bool_)
    for head in range(len(scores)):

        def order(i: int, head: int = head) -> tuple[bool, float, int, int]:
            score = float(scores[head, i])
            return score != score, 0.0 if score != score else -score, -int(seq[head, i]), i

        best = sorted(np.flatnonzero(candidates[head]).tolist(), key=order)[:k]
        out[head, best] = True
    return out


def evict(arrays: Sequence[NDArray], keep: Bool) -> list[NDArray]:
    """What is left of arrays ``[H, n, ...]``: the k-th hole among the first m rows takes the k-th kept row behind them."""
    kept = int(keep[0].sum()) if len(keep) else 0
    left = []
    for array in arrays:
        out = array[:, :kept].copy()
        for head in range(len(keep)):
            holes = np.flatnonzero(~keep[head, :kept])
            survivors = kept + np.flatnonzero(keep[head, kept:])
            out[head, holes] = array[head, survivors]
        left.append(out)
    return left


def shift(
    key: NDArray[np.floating],
    old: NDArray[np.int32],
    new: NDArray[np.int32],
    inv_freq: Float64,
    pair_axis: NDArray[np.uint8] | None = None,
) -> Float64:
    """Keys ``[H, n, D]`` rotated from positions ``old`` to ``new``, both ``[H, n, axes]``."""
    delta = new.astype(np.int64) - old
    return rotate(key, delta[..., 0], inv_freq) if pair_axis is None else rotate(key, delta, inv_freq, pair_axis)


def reindex(positions: Sequence[NDArray[np.int32]], prefix: int) -> tuple[list[NDArray[np.int32]], int]:
    """New positions of each layer's ``[H, n, axes]``, and the next free one: dense ranks from ``prefix`` on, head by head and
    axis by axis."""
    dense = [position.copy() for position in positions]
    for layer in dense:
        for head in layer:
            for place in head.T:
                later = place >= prefix
                place[later] = prefix + np.unique(place[later], return_inverse=True)[1].reshape(-1)
    return dense, 1 + max((int(layer.max()) for layer in dense if layer.size), default=-1)


def index_of(seq: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.int32]:
    """Where each of ``seq`` ``[H, n]`` stands first in ``known`` ``[H, m]``; -1 where it does not."""
    out = np.full(seq.shape, -1, np.int32)
    for head, i in np.ndindex(seq.shape):
        found = np.flatnonzero(known[head] == seq[head, i])
        out[head, i] = found[0] if len(found) else -1
    return out


def newer_similarity(
    key: NDArray[np.floating],
    position: NDArray[np.int32],
    seq: NDArray[np.int64],
    valid: Bool,
    inv_freq: Float64,
    since: int = 0,
    *,
    rotated: bool = False,
    pair_axis: NDArray[np.uint8] | None = None,
) -> Float64:
    """Highest cosine of each token's key with a newer one's; result as in :mod:`edgevlm.runtime.kernels`."""
    out = np.zeros(valid.shape)
    back = -position.astype(np.int64) if pair_axis is not None else -position[..., 0].astype(np.int64)
    keys = key.astype(np.float64) if rotated else rotate(key, back, inv_freq, pair_axis)
    for head, i in np.argwhere(valid):
        newer = np.flatnonzero(valid[head] & (seq[head] > seq[head, i]) & (seq[head] >= since))
        out[head, i] = max((_unit(keys[head, i]) @ _unit(keys[head, j]) for j in newer), default=-1.0)
    return out


def coreset(rows: NDArray[np.floating], count: int, diversity: float, directions: int, steps: int) -> tuple[list[int], float]:
    """The rows of a greedy coreset in order, and the least by which one was ahead of others that are not equal to it."""
    rows = rows.astype(np.float64)
    cover, rest, taken, ahead = np.full(len(rows), -1.0), (rows**2).sum(1), [], np.inf
    basis = np.zeros((0, rows.shape[1]))
    for step in range(count):
        if step <= steps:
            score = 1 - cover + (diversity * np.log(0.01 + np.maximum(rest, 0)) if diversity else 0)
        score[taken] = -np.inf
        best = int(score.argmax()) if step else 0
        others = score[score < score[best]]
        ahead = min(ahead, score[best] - others.max(initial=-np.inf)) if step else ahead
        taken.append(best)
        cover = np.maximum(cover, rows @ rows[best])
        new = rows[best] - basis.T @ (basis @ rows[best])
        if diversity and len(basis) < min(directions, rows.shape[1]) and np.linalg.norm(new) > 1e-3:
            basis = np.vstack([basis, new / np.linalg.norm(new)])
            rest = (rows**2).sum(1) - ((rows @ basis.T) ** 2).sum(1)
    return taken, ahead


def newest_frames(frame: NDArray[np.int32], among: Bool, count: int) -> Bool:
    """Rows of ``among`` in one of its ``count`` newest frames."""
    return among & np.isin(frame, sorted(set(frame[among].tolist()))[-count:] if count else [])


def attention_mass(
    query: NDArray[np.float32], query_seq: NDArray[np.int64], key: NDArray[np.floating], seq: NDArray[np.int64]
) -> Float64:
    """Softmax attention of each row over the tokens not above it in ``seq``, summed over rows and each KV head's group."""
    group = len(query) // len(key)
    mass = np.zeros(seq.shape)
    for head, rows in enumerate(query.astype(np.float64)):
        kv = head // group
        for row, place in zip(rows, query_seq, strict=True):
            seen = seq[kv] <= place
            score = key[kv, seen].astype(np.float64) @ row / np.sqrt(len(row))
            weight = np.exp(score - score.max(initial=-np.inf))
            mass[kv, seen] += weight / weight.sum()
    return mass


def attend(
    query,
    key,
    value,
    keys,
    values,
    held,
    *,
    rows=None,
    bias=None,
    shared=0,
    previous=None,
    until=None,
    window=0,
    place=None,
    position=None,
):
    """What S rows attend to, ``[S, Hq D]``; ``keys``, ``values`` hold the new rows already; see the kernel's documentation."""
    heads, _, width = keys.shape
    queries = query.reshape(len(key), heads, query.shape[1] // (heads * width), width).astype(np.float64)
    out = np.zeros_like(queries)
    for head, row in np.ndindex(heads, len(key)):
        first, seen, own = held[head], rows[head] if rows is not None else range(held[head]), 0
        if previous is not None:
            own, place = row // previous.shape[1] * previous.shape[1], row % previous.shape[1]
            before = previous[head, place] if own == 0 else first + row - previous.shape[1]
            seen = [*range(shared), *([before] if before >= 0 else [])]
        end = row + 1 if until is None else until[row]
        if window:
            seen = [each for each in seen if position[head, each] > place[row] - window]
            near = [each for each in range(end) if until[each] == end or place[each] > place[row] - window]
        else:
            near = range(own, end)
        at = np.array([*seen, *(first + each for each in near)], np.int64)
        scores = queries[row, head] @ keys[head, at].T / np.sqrt(width)
        if bias is not None:
            scores += np.where(at < first, bias[head, at], 0)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, head] = weights / weights.sum(-1, keepdims=True) @ values[head, at]
    return out.reshape(query.shape)

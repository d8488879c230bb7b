"""InfiniPot-V written down from the specification in float64, one token at a time: slow, and meant to be read.

A token is a dict with seq, frame, row, col, position, key and value; a head is a list of tokens; the prefix is not among them.
"""

import math

import numpy as np
from policies.filled import PAIR_AXIS


def unrotated(token, inv_freq):
    """The key before its rotary embedding: rotate by minus its position (rotate-half pairs d, d + D/2; of M-RoPE by axis)."""
    key, position = token["key"].astype(np.float64), np.asarray(token["position"])
    half = len(key) // 2
    angle = (position[PAIR_AXIS] if position.ndim else position) * inv_freq
    first, second = key[:half], key[half:]
    return np.concatenate([first * np.cos(angle) + second * np.sin(angle), second * np.cos(angle) - first * np.sin(angle)])


def cosine(a, b):
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norms) if norms > 0 else 0.0


def tar_scores(past, recent, inv_freq):
    """Eq. 4: minus the mean cosine with the tokens at the same patch of the recent frames that still hold it; +1 without."""
    recents = {}
    for token in recent:
        recents.setdefault((token["row"], token["col"]), []).append(unrotated(token, inv_freq))
    scores = []
    for token in past:
        mine, there = unrotated(token, inv_freq), recents.get((token["row"], token["col"]), [])
        cosines = [cosine(mine, other) for other in there]
        scores.append(-sum(cosines) / len(cosines) if cosines else 1.0)
    return scores


def van_scores(tokens, window):
    """Value norms averaged over the window of patches around each token in its own frame, absent patches left out."""
    reach, frames = window // 2, {}
    for token in tokens:
        norm = np.linalg.norm(token["value"].astype(np.float64))
        frames.setdefault(token["frame"], []).append((int(token["row"]), int(token["col"]), norm))
    scores = []
    for token in tokens:
        near = [
            norm
            for row, col, norm in frames[token["frame"]]
            if abs(row - int(token["row"])) <= reach and abs(col - int(token["col"])) <= reach
        ]
        scores.append(sum(near) / len(near))
    return scores


class NearTieError(Exception):
    """Two scores at the edge of a choice differ by less than float32 can tell."""


def best(tokens, scores, count):
    """The ``count`` highest scores; ties go to the newer token. Raises NearTieError where float32 may choose otherwise."""
    order = sorted(range(len(tokens)), key=lambda i: (scores[i], tokens[i]["seq"]), reverse=True)
    if 0 < count < len(order):
        last, next_one = scores[order[count - 1]], scores[order[count]]
        if 0 < last - next_one < 1e-6 * max(1.0, abs(last)):
            raise NearTieError
    return [tokens[i] for i in order[:count]]


def window_of(layer, layers, heads, thresholds):
    """By depth quartile, or by the layer's coefficient of variation when calibrated (Alg. 2, lines 16 to 21)."""
    if not thresholds:
        return (7, 5, 3, 1)[4 * layer // layers]
    norms = np.array([np.linalg.norm(token["value"].astype(np.float64)) for head in heads for token in head])
    spread = norms.std() / norms.mean()
    return next((size for size, tau in zip((7, 5, 3), thresholds, strict=True) if spread < tau), 1)


def select(heads, layer, layers, budget, per_frame, target, inv_freq, alpha=0.5, recent=0.125, thresholds=()):
    """The set of seqs that each head keeps."""
    r = max(1, math.ceil(recent * budget / per_frame - 1e-9))
    if r * per_frame > target:
        return [
            {t["seq"] for t in sorted(head, key=lambda t: t["seq"])[len(head) - min(target, len(head)) :]} for head in heads
        ]
    window = window_of(layer, layers, heads, thresholds)
    newest_frames = sorted({token["frame"] for head in heads for token in head})[-r:]
    quota = max(0, math.floor(alpha * target + 0.5) - r * per_frame)
    kept = []
    for head in heads:
        old = [t for t in head if t["frame"] not in newest_frames]
        recents = [t for t in head if t["frame"] in newest_frames]
        chosen = {t["seq"] for t in recents}
        chosen |= {t["seq"] for t in best(old, tar_scores(old, recents, inv_freq), quota)}
        van = van_scores(head, window)
        rest = [i for i, t in enumerate(head) if t["seq"] not in chosen]
        filled = best([head[i] for i in rest], [van[i] for i in rest], target - len(chosen))
        kept.append(chosen | {t["seq"] for t in filled})
    return kept

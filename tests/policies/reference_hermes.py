"""HERMES written down from the specification in float64, one token at a time: slow, and meant to be read.

A token is a dict with kind, seq, position, and key and value, ``[kv_heads, D]`` each; a layer is a list of tokens, prefix and
summary among them. Only tokens of kind "vision" compete.
"""

import math

import numpy as np


def bounds(layers, shallow=0.1, deep=0.7):
    """The first middle layer and the first deep one."""
    return math.floor(shallow * layers + 1e-9), math.floor(deep * layers + 1e-9)


def min_max(scores):
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) if high > low else 0.0 for score in scores]


def recency(tokens, k):
    """exp(-k dt), dt = rank from the newest / (count - 1)."""
    newest_first = sorted((token["seq"] for token in tokens), reverse=True)
    return [math.exp(-k * newest_first.index(token["seq"]) / max(len(tokens) - 1, 1)) for token in tokens]


def attention(queries, own_keys, layer, tokens, rows):
    """Mean over heads and guidance ``rows`` of softmax(q K^T / sqrt D) at ``tokens``; a row sees the guidance up to itself."""
    heads, _, width = queries.shape
    total = np.zeros(len(layer))
    for head in range(heads):
        kv_head = head // (heads // len(own_keys))
        memory = np.array([token["key"][kv_head] for token in layer], np.float64)
        for row in rows:
            keys = np.concatenate([memory, own_keys[kv_head, : row + 1].astype(np.float64)])
            logits = keys @ queries[head, row].astype(np.float64) / math.sqrt(width)
            weights = np.exp(logits - logits.max())
            total += (weights / weights.sum())[: len(layer)]
    mean = {token["seq"]: total[i] / (heads * len(rows)) for i, token in enumerate(layer) if any(token is t for t in tokens)}
    return [mean[token["seq"]] for token in tokens]


def raw_scores(layers, guidance, family="", shallow=0.1, deep=0.7):
    """Per layer the competing tokens and eqs. 1 to 4. guidance: queries and keys by layer, rows of each text."""
    queries, keys, rows = guidance
    global_rows, local_rows = range(rows[0]), range(rows[0], sum(rows))
    middle_from, deep_from = bounds(len(layers), shallow, deep)
    found = []
    for number, layer in enumerate(layers):
        tokens = [token for token in layer if token["kind"] == "vision"]
        x = (number - middle_from) / (deep_from - middle_from) if middle_from <= number < deep_from else 0
        k, omega = (20 - 12 * x, 0.75 - 0.6 * x) if family.startswith("qwen") else (20 - 19.5 * x, 1.0 - 0.9 * x)
        if number < middle_from:
            scores = min_max(recency(tokens, k))
        elif number >= deep_from:
            scores = min_max(attention(queries[number], keys[number], layer, tokens, global_rows))
        else:
            attended = min_max(attention(queries[number], keys[number], layer, tokens, [*global_rows, *local_rows]))
            recent = min_max(recency(tokens, k))
            scores = [(1 - omega) * a + omega * r for a, r in zip(attended, recent, strict=True)]
        found.append((tokens, scores))
    return found


def smoothed(found, lambdas):
    """Eq. 5 from the deepest layer up; lambdas of each layer."""
    tokens, scores = found[-1]
    done = [(tokens, list(scores))]
    for (tokens, scores), weight in zip(found[-2::-1], lambdas[-2::-1], strict=True):
        there = {token["seq"]: score for token, score in zip(*done[0], strict=True)}
        mixed = [
            (1 - weight) * score + weight * there[token["seq"]] if token["seq"] in there else score
            for token, score in zip(tokens, scores, strict=True)
        ]
        done.insert(0, (tokens, mixed))
    return done


def best(tokens, scores, count):
    """The seqs of the ``count`` highest scores; ties go to the newer token."""
    order = sorted(range(len(tokens)), key=lambda i: (scores[i], tokens[i]["seq"]), reverse=True)
    return {tokens[i]["seq"] for i in order[: max(0, count)]}


def rotated(key, by, inv_freq):
    """Keys ``[kv_heads, D]`` turned by ``by`` positions, rotate-half pairs (d, d + D/2)."""
    first, second = np.split(key.astype(np.float64), 2, -1)
    cos, sin = np.cos(by * inv_freq), np.sin(by * inv_freq)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def summary(evicted, inv_freq):
    """Alg. 1 over every token ever evicted, as they were: the mean of keys without rotary embedding, and of values."""
    keys = [rotated(token["key"], -token["position"], inv_freq) for token in evicted]
    return np.mean(keys, axis=0), np.mean([token["value"].astype(np.float64) for token in evicted], axis=0)

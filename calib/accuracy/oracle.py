"""A policy that knows the questions to come, an upper bound for the others.

It keeps the tokens that show the answers. It knows where an answer was shown, not which tokens the model reads it from, so a
better policy may exist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import Case
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.policies.base import Policy

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Order = Literal["newest", "spread"]


# by name, which tokens of an object come first, and how many newest frames stay whole before any
ORACLES: dict[str, tuple[Order, int]] = {"newest": ("newest", 0), "spread": ("spread", 0), "spread+frame": ("spread", 1)}


@dataclass
class Oracle(Policy):
    """Keep the ``recent`` newest frames and the tokens of highest priority, the same in all layers and heads.

    priority: float32 ``[tokens of the stream]``, fixed, so that no later choice misses a dropped token.
    """

    priority: Float32
    recent: int

    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "upper bound"

    @property
    def max_append(self) -> int:
        """One frame, so that no more than necessary is evicted."""
        return self.shape.tokens_per_frame

    def score(self, cache: KVCache, layer: int) -> Float32:
        seq, frame = cache.seq(layer), cache.frame(layer)
        score = self.priority[np.maximum(seq - self.shape.prefix, 0)]
        score[(cache.kind(layer) != Kind.PREFIX) & (frame > frame.max() - self.recent)] = np.inf
        return score


def make_oracle(name: str, case: Case) -> Oracle:
    """The oracle of this name for one stream and its questions."""
    order, recent = ORACLES[name]
    return Oracle(ranking(case, order), recent)


def ranking(case: Case, order: Order) -> Float32:
    """Priority of each token, all different: the questions' evidence in rounds, most asked first; then other objects likewise;
    then the background, newest first.
    """
    asked = Counter(tuple(question.evidence.tolist()) for question in case.questions if len(question.evidence))
    flat = case.owners.ravel()
    others = [np.flatnonzero(flat == number) for number in np.unique(flat[flat >= 0])]
    ranked = [
        *in_rounds([np.array(tokens) for tokens, _ in asked.most_common()], order),
        *in_rounds(others, order),
        *range(flat.size - 1, -1, -1),
    ]
    places = {token: place for place, token in reversed(list(enumerate(ranked)))}  # a token's first place
    return -np.array([places[token] for token in range(flat.size)], np.float32)


def in_rounds(groups: list[Int64], order: Order) -> list[int]:
    """One token of each group in turn, then the next of each. groups: rising tokens."""
    queues = [ordered(tokens, order) for tokens in groups]
    return [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]


def ordered(tokens: Int64, order: Order) -> list[int]:
    """``newest`` first, or ``spread``: the last, the first, then always the middle of a widest gap."""
    line = tokens.tolist()
    if order == "newest" or len(line) < 3:
        return line[::-1]
    taken, gaps = [line[-1], line[0]], [(0, len(line) - 1)]
    while len(taken) < len(line):
        low, high = gaps.pop(0)
        if high - low < 2:
            continue
        middle = (low + high) // 2
        taken.append(line[middle])
        gaps = sorted([*gaps, (low, middle), (middle, high)], key=lambda gap: gap[0] - gap[1])
    return taken

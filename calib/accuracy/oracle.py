"""Define the oracle, a policy that knows the questions in advance.

The oracle keeps the tokens that show the answers. Another policy can still beat the oracle, because the model may read an
answer from other tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import Case
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import Layer, Policy

Order = Literal["newest", "spread"]

# name -> the order in which an object's tokens are kept, and how many of the newest frames are kept whole
ORACLES: dict[str, tuple[Order, int]] = {"newest": ("newest", 0), "spread": ("spread", 0), "spread+frame": ("spread", 1)}


@dataclass
class Oracle(Policy):
    """Keep the newest frames and the tokens that matter most to the questions. All layers and heads keep the same tokens.

    ``recent``: the number of newest frames. ``priority``: how much each token of the stream matters, float32 ``[tokens]``.
    """

    priority: NDArray[np.float32]
    recent: int

    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "upper bound"

    @property
    def max_append(self) -> int:
        """Return the number of tokens in a frame, because appending several frames at once would evict too many tokens."""
        return self.shape.tokens_per_frame

    def score(self, layer: Layer) -> NDArray[np.float32]:
        score = self.priority[np.maximum(layer.seq - self.shape.prefix, 0)]
        score[(layer.kind != Kind.PREFIX) & (layer.frame > layer.frame.max() - self.recent)] = np.inf
        return score


def make_oracle(name: str, case: Case) -> Oracle:
    order, recent = ORACLES[name]
    return Oracle(ranking(case, order), recent)


def ranking(case: Case, order: Order) -> NDArray[np.float32]:
    """Return how important each token of the stream is to the questions. No two tokens are equally important.

    Tokens that show an answer come first, then those of other objects, then the background, newest first. Objects take turns,
    one token at a time, starting with the object that has the most questions.
    """
    asked = Counter(tuple(question.evidence.tolist()) for question in case.questions if len(question.evidence))
    flat = case.owners.ravel()
    others = [np.flatnonzero(flat == number).tolist() for number in np.unique(flat[flat >= 0])]
    evidence = [list(tokens) for tokens, _ in asked.most_common()]
    ranked = [*_in_rounds(evidence, order), *_in_rounds(others, order), *range(flat.size - 1, -1, -1)]
    places = {token: place for place, token in reversed(list(enumerate(ranked)))}  # a token ranked twice keeps its first place
    return -np.array([places[token] for token in range(flat.size)], np.float32)


def _in_rounds(groups: list[list[int]], order: Order) -> list[int]:
    """Return each group's first token, then each group's second, and so on. ``groups``: lists of tokens, oldest first."""
    rounds = zip_longest(*(tokens[::-1] if order == "newest" else _spread(tokens) for tokens in groups))
    return [token for turn in rounds for token in turn if token is not None]


def _spread(tokens: list[int]) -> list[int]:
    """Reorder tokens: the last, the first, and then repeatedly the token in the middle of the widest gap."""
    if len(tokens) < 3:
        return tokens[::-1]
    taken, gaps = [tokens[-1], tokens[0]], [(0, len(tokens) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            taken.append(tokens[middle])
            gaps = sorted([*gaps, (low, middle), (middle, high)], key=lambda gap: gap[0] - gap[1])
    return taken

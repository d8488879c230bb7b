"""Find the heads that look at what answers a question, and tell whether that is still held, on the demo world.

The heads are chosen under full KV. The rule is a logistic regression on each head's best and median score over the frames'
rows, under policies that keep what was asked about and policies that lose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import Case, make_case, seed_words
from edgevlm.calib.accuracy.evidence_score import EvidenceScore, score_evidence
from edgevlm.calib.write import as_calibrated
from edgevlm.runtime.calibration import EvidenceHeads
from edgevlm.runtime.changes import ALL
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

HEADS = 2  # that are looked at
FRAMES = 62
KEEPS, LOSES = ("last-seen", "infinipot-v"), ("sliding-window", "uniform")
BUDGETS = (1 / 8, 1 / 16)
MISTAKEN = 0.05  # of the questions whose evidence is held, that may be said to be no longer in memory
STEPS, RATE, DECAY = 4000, 5.0, 1e-4  # of gradient descent

Float64 = NDArray[np.float64]


def select_evidence(
    model: Model, streams: int, seed: str = "0", progress: Callable[[str], object] = lambda _: None
) -> EvidenceHeads:
    """The layer, its heads, and the rule. streams: of the demo world, of ``FRAMES`` frames each."""
    spec, words = model.bundle.decoder, seed_words(seed)
    cases = [make_case(words, stream, FRAMES) for stream in range(streams)]
    tokens = FRAMES * model.bundle.vision.tokens_per_frame
    hits = {}
    for layer in range(spec.layers):
        progress(f"looking for evidence in layer {layer}")
        for head in range(spec.heads):
            scores = list(_scores(model, EvidenceHeads(layer, (head,)), cases[: max(1, streams // 2)], "full", tokens))
            hits[layer, head] = float(np.mean([score.hit1 + score.overlap for score, _ in scores]))
    layer = max(hits, key=hits.__getitem__)[0]
    best = sorted(range(spec.heads), key=lambda head: -hits[layer, head])[:HEADS]
    heads = EvidenceHeads(layer, tuple(sorted(best)))
    held, features = [], []
    for policy in (*KEEPS, *LOSES):
        progress(f"asking under {policy}")
        for share in BUDGETS:
            for score, seen in _scores(model, heads, cases, policy, int(share * tokens)):
                held.append(score.held)
                features.append(seen)
    return with_rule(heads, np.array(features), np.array(held))


def with_rule(heads: EvidenceHeads, features: Float64, held: NDArray[np.bool_]) -> EvidenceHeads:
    """Fit the rule to features ``[n, 2 x heads]``; ``MISTAKEN`` of those held fall below 0. Without both kinds: no rule."""
    if held.all() or not held.any():
        return heads
    mean, spread = features.mean(0), features.std(0) + 1e-9
    inputs = np.c_[(features - mean) / spread, np.ones(len(features))]
    balance = np.where(held, 0.5 / held.sum(), 0.5 / (~held).sum())
    weights = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        guess = 1 / (1 + np.exp(-inputs @ weights))
        weights -= RATE * (inputs.T @ ((guess - held) * balance) + DECAY * weights)
    scores = inputs[:, :-1] @ weights[:-1]
    scaled = weights[:-1] / spread
    bias = -float(np.quantile(scores[held], MISTAKEN)) - float(scaled @ mean)
    return replace(heads, weights=tuple(round(float(x), 5) for x in scaled), bias=round(bias, 5))


def _scores(
    model: Model, heads: EvidenceHeads, cases: Sequence[Case], policy: str, budget: int
) -> Iterator[tuple[EvidenceScore, Float64]]:
    """Of each question with evidence that was answered right, or whose evidence is gone: the score, and the rule's features."""
    from edgevlm.calib.accuracy.worker import TEXT_BUDGET, held_tokens

    used = as_calibrated(model, evidence=heads)
    for case in cases:
        with Session.open(used, policy=policy, budget=budget, text_budget=TEXT_BUDGET, append=ALL, encode=ALL) as session:
            for frame in case.frames:
                session.watch(frame)
            session.flush()
            held = held_tokens(session.cache, case.owners.size, model.bundle.vision.grid)
            for question in case.questions:
                if not len(question.evidence):
                    continue
                answer = session.ask(question.text)
                right = question.is_right(answer.text.strip())
                looked = answer.looked
                if answer.evidence is None or looked is None or looked.blind:
                    continue
                score = score_evidence(answer.evidence, case, question, held, model.bundle.vision.grid)
                if right or not score.held:
                    yield score, looked.features

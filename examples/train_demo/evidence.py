"""On the demo world, find the heads that attend to a question's evidence, and a rule for whether the evidence is still held.

`python examples/train_demo/evidence.py BUNDLE --streams 16` writes both into the bundle of a model trained on the demo world.

The heads are chosen under full KV. The rule is a logistic regression on each head's best and median score over the frames'
rows, on its query's length, and on the answer's certainty, under policies that keep the evidence and others that lose it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import Case, CaseQuestion, EvidenceScore, make_case, score_evidence, seed_words
from edgevlm.calib.accuracy.worker import TEXT_BUDGET, held_tokens
from edgevlm.calib.write import as_calibrated, write_calibration
from edgevlm.progress import Notify
from edgevlm.runtime.calibration import EvidenceHeads
from edgevlm.runtime.evidence import QuestionAttention
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

HEADS = 2  # heads to choose
FRAMES = 128
KEEPS, LOSES = ("last-seen", "infinipot-v"), ("sliding-window", "uniform", "random")
BUDGETS = (1 / 8, 1 / 16)
MISTAKEN = 0.04  # fraction of questions with held evidence that may be reported as no longer in memory
STEPS, RATE, DECAY = 4000, 5.0, 1e-4  # of gradient descent

Float64 = NDArray[np.float64]


def select_evidence(model: Model, streams: int, progress: Notify = lambda _: None) -> EvidenceHeads:
    """Find the evidence layer, its heads, and the rule.

    streams: the number of demo streams of ``FRAMES`` frames; half of them choose the heads.
    """
    spec, words = model.bundle.decoder, seed_words("0")
    cases = [make_case(words, stream, FRAMES) for stream in range(streams)]
    tokens, grid = FRAMES * model.bundle.vision.tokens_per_frame, model.bundle.vision.grid
    hits = defaultdict(list)
    for layer in range(spec.layers):
        progress(f"looking for evidence in layer {layer}")
        every = EvidenceHeads(layer, tuple(range(spec.heads)))
        for asked in _ask(model, every, cases[: max(1, streams // 2)], "full", tokens):
            for head, attention in enumerate(by_head(asked.attention)):
                score = asked.score(attention, grid)
                hits[layer, head].append(score.hit1 + score.overlap)
    merit = {place: float(np.mean(of)) for place, of in hits.items()}
    layer = max(merit, key=merit.__getitem__)[0]
    best = sorted(range(spec.heads), key=lambda head: -merit[layer, head])[:HEADS]
    heads = EvidenceHeads(layer, tuple(sorted(best)))
    held, features = [], []
    for policy in (*KEEPS, *LOSES):
        progress(f"asking under {policy}")
        for fraction in BUDGETS:
            for asked in _ask(model, heads, cases, policy, int(fraction * tokens)):
                held.append(asked.score(asked.attention, grid).held)
                features.append(asked.attention.features)
    return with_rule(heads, np.array(features), np.array(held))


def by_head(attention: QuestionAttention) -> Iterator[QuestionAttention]:
    """Yield the attention of each head separately."""
    for score, length, known in attention.scores:
        for head in range(len(score)):
            one = copy(attention)
            one.scores = [(score[[head]], length[[head]], known)]
            yield one


def with_rule(heads: EvidenceHeads, features: Float64, held: NDArray[np.bool_]) -> EvidenceHeads:
    """Fit the rule to features ``[n, 3 x heads + 3]``; ``MISTAKEN`` of those held fall below 0."""
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


class AskedQuestion(NamedTuple):
    """A question, its attention, and what the memory held then: bool ``[layers, kv_heads, tokens of the stream]``."""

    case: Case
    question: CaseQuestion
    attention: QuestionAttention
    held: NDArray[np.bool_]

    def score(self, attention: QuestionAttention, grid: tuple[int, int]) -> EvidenceScore:
        return score_evidence(attention.evidence(), self.case, self.question, self.held, grid)


def _ask(model: Model, heads: EvidenceHeads, cases: Sequence[Case], policy: str, budget: int) -> Iterator[AskedQuestion]:
    """Yield each question that has evidence and was answered right, or whose evidence is gone."""
    used, grid = as_calibrated(model, evidence=heads), model.bundle.vision.grid
    for case in cases:
        with Session.open(used, policy=policy, budget=budget, text_budget=TEXT_BUDGET, append=ALL, encode=ALL) as session:
            for frame in case.frames:
                session.watch(frame)
            session.flush()
            held = held_tokens(session.cache, case.owners.size, grid)
            for question in case.questions:
                if not len(question.evidence):
                    continue
                answer = session.ask(question.text)
                right = question.is_right(answer.text.strip())
                if answer.looked is None or answer.looked.blind:
                    continue
                asked = AskedQuestion(case, question, answer.looked, held)
                if right or not asked.score(answer.looked, grid).held:
                    yield asked


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the evidence heads of a model of the demo world.")
    parser.add_argument("bundle")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write a copy instead of changing the bundle")
    options = parser.parse_args()
    model = Model.load(options.bundle)
    found = select_evidence(model, options.streams, print)
    print(found)
    print(write_calibration(model.bundle, evidence=found, out=options.out))


if __name__ == "__main__":
    main()

"""Several questions to one memory: no answer may depend on the questions before it (InfiniPot-V, App. C)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgevlm.bench.accuracy.sitting import ROOM
from edgevlm.bench.accuracy.streamqa import Exam, Question
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.session import Session

GUIDED = "snapkv-guided"
"""SnapKV that holds whole streams and compresses them under a question: what that does to the questions after it."""


def take_turns(
    model: Model, exam: Exam, policy: Callable[[], Policy], tokens: int, reindexing: Reindexing, count: int, order: list[int]
) -> dict[str, Any]:
    """Ask ``count`` questions one after another, and each again of a session of its own that watched the same stream.

    policy: makes a fresh one; order: the seed of which questions and in which order. Per turn: kind, right, fresh (right when
    asked alone), same (the answers are the same tokens).
    """
    asked = choose(exam, count, order)

    def session() -> Session:
        opened = Session.open(model, policy=policy(), budget=tokens, reindexing=reindexing, room=ROOM)
        for frame in exam.frames:
            opened.watch(frame)
        return opened

    with session() as one:
        answers = [answer_of(one, question) for question in asked]
    results = []
    for question, (text, ids) in zip(asked, answers, strict=True):
        with session() as fresh:
            alone, alone_ids = answer_of(fresh, question)
        right, fresh_right = text == question.answer, alone == question.answer
        results.append({"kind": question.kind, "right": right, "fresh": fresh_right, "same": ids == alone_ids})
    return {"turns": results}


def choose(exam: Exam, count: int, order: list[int]) -> list[Question]:
    """``count`` questions in a random order, those about before first: the others hardly depend on what is kept."""
    shuffled = [exam.questions[place] for place in np.random.default_rng(order).permutation(len(exam.questions))]
    return sorted(shuffled, key=lambda question: question.is_about_now)[:count]


def answer_of(session: Session, question: Question) -> tuple[str, list[int]]:
    answer = session.ask(question.text)
    return answer.text.strip(), answer.token_ids

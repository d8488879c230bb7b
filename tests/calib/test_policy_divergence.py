"""Agreement with full KV: the KL against plain numpy over two sessions, equal bytes, and work that is kept."""

import math

import numpy as np
import pytest
from pictures import frames

from edgevlm.calib import Clip
from edgevlm.calib.accuracy import policy_divergence
from edgevlm.calib.accuracy.memory_accounting import peak_bytes
from edgevlm.calib.accuracy.policy_divergence import CHUNK, DivergenceMeter
from edgevlm.calib.accuracy.select_policy import SETTINGS, compare_by_divergence
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.session import Session

QUESTIONS = ("what color was the square?", "how many are there now?")
COUNT = 20  # frames: no multiple of a chunk
BOUNDED = [name for name, policy in POLICIES.items() if policy.bounded]


class Pictures:
    """The frames of a clip, from the beginning each time."""

    def __init__(self, count, model, seed=0):
        self.made = list(frames(count, model, seed))

    def __iter__(self):
        return iter(self.made)


@pytest.fixture(scope="module")
def clip(model):
    return Clip("clip", Pictures(COUNT, model), ())


@pytest.fixture(scope="module")
def watched(model, clip):
    judge = DivergenceMeter(model, QUESTIONS)
    return judge, judge.reference(clip, COUNT, 0)


def step_by_step(session, question, answer):
    """Logits before each token of ``answer``, each token appended by a call of its own, ``[tokens, vocabulary]``."""
    model, stream = session.model, session._stream
    ids = session._chat.suffix([], question)
    rows = np.concatenate([model.closing, model.engine.embed(np.array(ids))])
    found = []
    with stream.question():
        for token in answer:
            found.append(stream.append_text(rows).copy())
            rows = model.engine.embed(np.array([token]))
    return np.array(found, np.float64)


def kl(p_logits, q_logits):
    """sum over the vocabulary of p log(p / q), row by row."""
    p = np.exp(p_logits) / np.exp(p_logits).sum(1, keepdims=True)
    q = np.exp(q_logits) / np.exp(q_logits).sum(1, keepdims=True)
    return [math.fsum(a * math.log(a / b) for a, b in zip(*rows, strict=True) if a > 0) for rows in zip(p, q, strict=True)]


@pytest.mark.parametrize("name", ["sliding-window", "infinipot-v", "h2o"])
def test_kl_and_top1_are_those_of_two_sessions_in_plain_numpy(model, clip, watched, name):
    """Both sessions watch the clip to its end and are given full KV's own greedy answers."""
    judge, reference = watched
    per_frame = judge.per_frame
    found = judge.measure(reference, create_policy(name), 6 * per_frame, 6 * per_frame)
    expected_kl, expected_top1 = [], []
    with (
        Session.open(model, append="all", policy="full", budget=COUNT * per_frame) as full,
        Session.open(model, append="all", policy=name, budget=6 * per_frame) as ours,
    ):
        for frame in clip.frames:
            full.watch(frame)
            ours.watch(frame)
        full.flush()
        ours.flush()
        for question in QUESTIONS:
            said = full.ask(question, max_tokens=policy_divergence.ANSWER)
            said.wait()
            answer = [*said.token_ids, *([0] if said.finish_reason == "stop" else [])]  # the stop token is compared too
            p, q = step_by_step(full, question, answer), step_by_step(ours, question, answer)
            assert p.argmax(1)[: len(said.token_ids)].tolist() == said.token_ids
            expected_kl += kl(p, q)
            expected_top1 += (p.argmax(1) == q.argmax(1)).tolist()
    assert found["kl"][-1] == pytest.approx(expected_kl, abs=2e-4, rel=1e-3)
    assert found["top1"][-1] == expected_top1
    assert max(expected_kl) > 0.01, "something was forgotten"
    assert found["compressions"] > 0


@pytest.fixture(scope="module")
def longer(model):
    """60 frames, of which nobody asks."""
    judge = DivergenceMeter(model, QUESTIONS)
    return judge, judge.reference(Clip("longer", Pictures(60, model), ()), 60, 10**9)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_decoder_that_computes_nothing_tells_the_bytes(model, longer, name):
    """As many as cache and policy take in the real stream, and within what a sliding window takes."""
    judge, reference = longer
    budget = 40 * judge.per_frame
    tokens = judge.fitted(name, budget, 60)
    real = judge.measure(reference, create_policy(name), tokens, budget)["bytes"]
    assert real == peak_bytes(model, create_policy(name), tokens, judge._prefix, judge._text_rows, 60, CHUNK)
    assert real <= judge._peak_bytes("sliding-window", 0, budget)


class Killed(BaseException):
    pass


def test_what_was_measured_before_a_kill_is_not_measured_again(model, tmp_path, monkeypatch):
    clips = [Clip("a", Pictures(COUNT, model, 1), ()), Clip("b", Pictures(COUNT, model, 2), ())]
    names, done = ["sliding-window", "uniform"], []
    measure = DivergenceMeter.measure

    def counted(judge, reference, policy, tokens, budget, append=None):
        if len(done) == 6:  # among the taus of the first clip
            raise Killed
        done.append((policy.name, budget, reference.features.sum()))
        return measure(judge, reference, policy, tokens, budget, append)

    def compare(journal):
        judge = DivergenceMeter(model, QUESTIONS)
        found = compare_by_divergence(judge, clips, COUNT, names, [24, 60], tmp_path / journal, lambda what: None)
        return {
            budget: [(of.candidate.policy, of.candidate.value, of.candidate.top1, of.values) for of in measured]
            for budget, measured in found.measured.items()
        } | {"append": found.append, "encode": found.encode}

    whole = compare("whole.jsonl")
    monkeypatch.setattr(DivergenceMeter, "measure", counted)
    with pytest.raises(Killed):
        compare("killed.jsonl")
    with (tmp_path / "killed.jsonl").open("ab") as journal:
        journal.write(b'{"policy": "unif')  # cut short
    monkeypatch.setattr(DivergenceMeter, "measure", lambda *given: done.append(given[2:]) or measure(*given))
    assert compare("killed.jsonl") == whole
    assert len(done) == 24, "two clips, two policies at two budgets, four taus, four ways to encode: nothing twice"
    assert compare("killed.jsonl") == whole
    assert len(done) == 24
    assert list(whole) == [24, 60, "append", "encode"]
    often, seldom = (of for of in whole["encode"].trials if of.setting in (str(SETTINGS[-1]), str(SETTINGS[0])))
    assert seldom.encoded <= often.encoded
    assert seldom.low_cosine <= often.low_cosine <= 1.0001
    assert all(0 < of.appended <= 1 and 0 <= of.loss <= 1 for of in whole["append"].trials)
    assert [name for name, *_ in whole[24]] == names
    assert [len(values) for *_, values in whole[60]] == [4, 4], "(clip, moment) is a cluster"

"""Evidence: the frames an answer was read from, against the demo world's truth."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgevlm import Session
from edgevlm.calib.accuracy.cases import Case, make_case, score_evidence, seed_words
from edgevlm.calib.accuracy.worker import held_tokens
from edgevlm.runtime.calibration import EvidenceHeads
from edgevlm.runtime.evidence import CLOSE_S, KNOTS, FrameTimes, QuestionAttention, SeenRows
from edgevlm.runtime.model import Model

FRAMES = 48


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(seed_words("5"), 0, FRAMES)


def watched(case: Case, **settings: object) -> Session:
    session = Session.open("demo", **settings)  # type: ignore[arg-type]
    for number, frame in enumerate(case.frames):
        session.watch(frame, number / 2)
    return session


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "full", "append": "all"},
        {"policy": "last-seen", "budget": 64, "append": "all"},
        {"policy": "last-seen", "budget": 64, "append": "changed"},
        {"policy": "hybrid", "budget": 64, "append": "all"},  # what it fetched is seen too
    ],
    ids=lambda settings: f"{settings['policy']}-{settings['append']}",
)
def test_evidence_shows_the_object_asked_about(case: Case, settings: dict[str, object]) -> None:
    hits, boxes = [], []
    with watched(case, **settings) as session:
        session.flush()
        grid = session.model.bundle.vision.grid
        held = held_tokens(session.cache, case.owners.size, grid)
        for question in case.questions:
            answer = session.ask(question.text)
            if question.is_right(answer.text.strip()) and len(question.evidence):
                assert answer.evidence is not None
                score = score_evidence(answer.evidence, case, question, held, grid)
                if score.held:
                    hits.append(score.hit1)
                    boxes.append(score.overlap)
                    best = answer.evidence.moments[0]
                    assert (best.time_s, best.until_s) == (best.frame / 2, best.last_frame / 2)
    assert len(hits) > 5
    assert np.mean(hits) >= 0.9
    assert np.mean(boxes) >= 0.7


def test_what_has_left_the_memory_is_said_to_be_gone(case: Case) -> None:
    with watched(case, policy="sliding-window", budget=32, append="all") as session:
        held = held_tokens(session.cache, case.owners.size, session.model.bundle.vision.grid)
        gone = [q for q in case.questions if len(q.evidence) and not q.is_about_now and not held[:, :, q.evidence].any()]
        said = [answer.evidence.held for q in gone if (answer := session.ask(q.text)).text and answer.evidence is not None]
    assert len(said) > 3
    assert np.mean(said) <= 0.25


def test_a_resumed_stream_gives_the_same_evidence(case: Case, tmp_path: Path) -> None:
    question = next(q for q in case.questions if q.kind == "first_color")
    with watched(case, policy="last-seen", budget=64, state=tmp_path) as session:
        before = session.ask(question.text)
        assert before.text
    with Session.open("demo", policy="last-seen", budget=64, state=tmp_path) as session:
        after = session.ask(question.text)
        assert after.text == before.text
    assert after.evidence == before.evidence
    assert after.evidence is not None
    assert after.evidence.moments


def test_weights_are_the_softmax_of_the_scores() -> None:
    rng, places = np.random.default_rng(0), np.arange(6)
    groups = []
    for heads in (2, 1):
        rows = SeenRows(rng.normal(size=(6, 8)).astype(np.float32), places // 2, 0 * places, places % 2, places // 2)
        groups.append((rng.normal(size=(heads, 8)).astype(np.float32), [rows]))
    logits = np.log(np.float32([0.5, 0.25, 0.25])) + 7
    look = QuestionAttention(groups, EvidenceHeads(0, (0, 1, 2)), (1, 2), 1, FrameTimes(), logits)
    expected, features = np.zeros(6), []
    for queries, (rows,) in groups:
        for query in queries.astype(np.float64):
            scores = rows.key.astype(np.float64) @ query / 8**0.5
            expected += np.exp(scores) / np.exp(scores).sum() / 3
            features += [scores.max(), np.median(scores), np.linalg.norm(query)]
    token, _, weight = look.weights()
    np.testing.assert_array_equal(token, places)
    np.testing.assert_allclose(weight, expected, rtol=1e-5)
    sure = [np.log(0.5) + 7, np.log(0.5), 1.5 * np.log(2)]
    np.testing.assert_allclose(look.features, [*features, *sure], rtol=1e-5)
    nothing = [SeenRows(*(part[:0] for part in groups[0][1][0]))]
    assert QuestionAttention([(groups[0][0], nothing)], EvidenceHeads(0, (0,)), (1, 2), 1, FrameTimes(), logits).blind


def test_times_are_kept_within_half_a_second_in_constant_memory() -> None:
    rng = np.random.default_rng(0)
    times, seconds = FrameTimes(), np.cumsum(0.5 + rng.uniform(-0.05, 0.05, 5 * KNOTS))
    seconds[9000:] += 3600  # a camera that was away for an hour
    for frame, second in enumerate(seconds):
        times.add(frame, float(second))
    off = [abs(times.at(frame) - second) for frame, second in enumerate(seconds)]
    assert len(times.state()["frame"]) <= KNOTS
    assert max(off) <= 4 * CLOSE_S  # an error for each time that its neighbours were thinned
    times.add(10_000, 1.0)  # frames seen in a question are taken back
    assert times.at(10_000) == times.at(20_000) == 1.0


@pytest.mark.parametrize("change", [{"layer": 4}, {"heads": (4,)}, {"heads": ()}, {"weights": (1.0,)}, {"bias": 12345}])
def test_evidence_json_is_checked(change: dict[str, object]) -> None:
    good = EvidenceHeads(3, (0, 1), (1.0, 0.5, 2.0) * 3, -3.0)
    assert EvidenceHeads.from_json(good.to_json()) == good
    bad = replace(good, **change).to_json().replace(b"12345", b"NaN")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer|weights|bias"):
        EvidenceHeads.from_json(bad).check(4, 4)


def test_a_model_nobody_calibrated_names_frames_and_claims_nothing(case: Case) -> None:
    model = Model.load("demo")
    spec = model.bundle.decoder
    plain = EvidenceHeads.uncalibrated(spec.layers, spec.heads)
    from edgevlm.calib.write import as_calibrated

    with Session.open(as_calibrated(model, evidence=plain), policy="full") as session:
        session.watch(case.frames[0])
        answer = session.ask("how many objects are there now?")
        assert answer.text
        assert answer.evidence is not None
        assert answer.evidence.held is None
        assert answer.evidence.moments
    model.close()

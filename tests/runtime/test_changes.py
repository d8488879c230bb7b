"""Only what changed enters the memory, and every question sees the newest frame whole."""

from __future__ import annotations

import numpy as np
import pytest
from memory import arena
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.changes import References
from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.settings import AppendChanged

QUESTION = "what color was the square?"
TEXT_BUDGET = TextBudget(32, 64, 32)


def opened(model, append, policy="full", frames=24, **more):
    budget = frames * (model.bundle.vision.tokens_per_frame + 40)
    return Session.open(model, policy=policy, budget=more.pop("budget", budget), append=append, text_budget=TEXT_BUDGET, **more)


def answer(session):
    said = session.ask(QUESTION, max_tokens=12)
    said.wait()
    return said.token_ids


def logits(session):
    ids = np.asarray(session.model.encode(QUESTION), np.int64)
    with session._stream.question():
        return session._stream.append_question(session.model.engine.embed(ids))


@pytest.mark.parametrize(("chunk", "present"), [(1, 1), (4, 1), (1, 3), (4, 3), (8, 2)])
def test_frames_that_change_everywhere_are_answered_as_whole_frames_are(model, chunk, present):
    """The present is another place for the newest frames, not another answer."""
    append = f"changed:refresh=1,present={present}"
    with opened(model, "all", chunk=chunk) as whole, opened(model, append, chunk=chunk) as changed:
        for image in frames(11, model):
            whole.watch(image)
            changed.watch(image)
        assert answer(changed) == answer(whole)
        assert changed.stats.memory.appended == 1


def test_a_still_picture_enters_once_and_is_seen(model):
    images = list(frames(2, model))
    with opened(model, "changed", chunk=2) as session:
        for _ in range(6):
            session.watch(images[0])
        session.flush()
        per_frame = model.bundle.vision.tokens_per_frame
        groups = 6 // model.bundle.vision.group
        held = int((session.cache.kind(0)[0] == Kind.VISION).sum())
        assert held == (per_frame if groups > 1 else 0)
        memory = session.stats.memory
        assert (memory.tokens_seen, memory.tokens_appended) == ((groups - 1) * per_frame, held)
        still = logits(session)
        for _ in range(2):
            session.watch(images[1])
        session.flush()
        assert np.abs(logits(session) - still).max() > 1e-3, "the present is another picture"


@pytest.mark.parametrize(
    "policy",
    ["full", "last-seen", "infinipot-v", "h2o", "coreset", "first-seen", "streaming-llm", "simple-stream", "uniform", "rekv"],
)
def test_questions_leave_no_trace_and_the_cap_holds(model, policy):
    per_frame = model.bundle.vision.tokens_per_frame + 40
    budget = {} if policy == "full" else {"budget": 4 * per_frame}
    with opened(model, "changed:tau=0.9999", policy, chunk=4, **budget) as asked, opened(
        model, "changed:tau=0.9999", policy, chunk=4, **budget
    ) as silent:  # fmt: skip
        for number, image in enumerate(frames(23, model)):
            asked.watch(image)
            silent.watch(image)
            if number % 3 == 1:
                answer(asked)
            assert asked.cache.lengths.max() <= asked._stream.prefix + asked.budget
        asked.flush()
        silent.flush()
        assert arena(asked._stream) == arena(silent._stream)
        assert 0 < asked.stats.memory.appended < 1


@pytest.mark.parametrize(
    ("policy", "append"),
    [
        (policy, "changed:tau=0.9999,present=2")
        for policy in ("last-seen", "mosaic:index=0.25", "simple-stream", "hybrid", "resv:index=0.25")
    ]
    + [("mosaic:index=0.25", "all")],
)
def test_a_snapshot_goes_on_with_the_same_present_and_references(model, tmp_path, policy, append):
    per_frame = model.bundle.vision.tokens_per_frame
    images = list(frames(30, model))

    def resumed(state):
        return opened(model, append, policy, chunk=4, budget=6 * per_frame, state=state)

    with resumed(tmp_path / "whole") as session:
        for image in images:
            session.watch(image)
        expected = answer(session)
    with resumed(tmp_path / "parts") as session:
        for image in images[:17]:
            session.watch(image)
    with resumed(tmp_path / "parts") as session:
        for image in images[17:]:
            session.watch(image)
        assert answer(session) == expected
        assert session.store is None or session.store.stats.bytes_disk, "what left before the snapshot is read from the file"
    with pytest.raises(UserError, match="append"):
        opened(model, "changed:tau=0.5", policy, chunk=4, budget=6 * per_frame, state=tmp_path / "parts")


def test_a_row_knows_the_frame_that_last_showed_what_it_shows(model, tmp_path):
    """Also after a snapshot; what another token has replaced stays as it was."""
    first, second = frames(2, model)
    group = model.bundle.vision.group
    shown = [*[first] * 3 * group, *[second] * 2 * group, second]

    def watched(images):
        with opened(model, "changed:tau=0.9999", chunk=group, state=tmp_path) as session:
            for image in images:
                session.watch(image)
            session.flush()
            cache = session.cache
            seen = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
            return [(cache.frame(layer)[rows], cache.confirmed(layer)[rows]) for layer, rows in enumerate(seen)]

    watched(shown[: 2 * group])
    for frame, confirmed in watched(shown[2 * group :]):
        assert set(frame[frame < 3]) == {0}
        assert set(frame) == {0, 3}
        assert set(confirmed[frame == 3]) == {4}, "the present is no row of the memory"
        assert set(confirmed[frame == 0]) <= {2, 4}, "replaced in frame 3, or still shown"
        assert (confirmed[frame == 0] == 2).any()


def test_slow_drift_is_compared_with_what_was_appended():
    """Each frame looks like the one before, and not like the one that was appended."""
    references, appended = References(AppendChanged(tau=0.99), 1, 2), []
    for angle in np.arange(40) * 0.02:
        feature = np.float32([[np.cos(angle), np.sin(angle)]])  # of length 1
        changed = references.changed(feature)
        references.appended(feature, changed, np.arange(changed.sum()))
        appended.append(bool(changed[0]))
    first = int(np.flatnonzero(appended)[1])
    assert appended[0]
    assert np.cos(first * 0.02) < 0.99 <= np.cos((first - 1) * 0.02)
    assert sum(appended) == 1 + 39 // first


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.01])
def test_noise_is_no_change_and_a_change_is(noise):
    """Of 16 patches with the camera's noise in their features, the one that shows something else now and then is appended."""
    rng = np.random.default_rng(3)
    wall, thing = rng.standard_normal((2, 16, 64)).astype(np.float32)
    references, appended = References(AppendChanged(), 16, 64), np.zeros(16, int)
    for frame in range(60):
        features = np.where(frame % 20 >= 10, thing, wall) if frame else wall
        features = np.where(np.arange(16)[:, None] == 5, features, wall)
        features = features + noise * 2 * rng.standard_normal(features.shape).astype(np.float32)
        changed = references.changed(features)
        references.appended(features, changed, np.arange(changed.sum()))
        appended += changed
    assert appended[5] >= 6
    assert np.delete(appended, 5).mean() < 1.5


def test_movement_everywhere_is_not_taken_for_noise():
    rng = np.random.default_rng(4)
    references = References(AppendChanged(), 16, 64)
    for _ in range(20):
        features = rng.standard_normal((16, 64)).astype(np.float32)
        assert references.changed(features).all()
        references.appended(features, np.ones(16, bool), np.arange(16))

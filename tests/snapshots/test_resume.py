"""A session that goes on from a snapshot is the one that was never stopped: same memory to the bit, same tokens."""

import itertools

import numpy as np
import pytest
from memory import arena
from pictures import frames

from edgevlm.errors import SnapshotError, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.model import demo_bundle
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.snapshots.writer import model_hash

TEXT_BUDGET = TextBudget(24, 64, 8)
ASKED = "what color was the square?"
BEFORE, AFTER = 21, 14  # frames

TINY = {"resv": "resv:index=0.25", "mosaic": "mosaic:index=0.25"}  # with an index of a few clusters even here
VARIANTS = [
    *(TINY.get(name, name) for name in POLICIES if name != "full"),
    "full",
    "snapkv:window=6",
    "h2o",
    "purekv:window=6,st_spattn=on",
    "hermes:target=0.6",
]
WAYS = [("llava", "lazy"), ("qwen2_vl", "eager"), ("llava", "eager"), ("qwen2_vl", "lazy")]
CASES = [
    *((policy, *way) for policy, way in zip(VARIANTS, itertools.cycle(WAYS), strict=False)),
    *((policy, *way) for policy in ("last-seen", "hermes", "hybrid") for way in WAYS),
    *((policy, "qwen2_5_vl", "eager") for policy in ("last-seen", "hermes")),
    *((policy, "qwen3_vl", "lazy") for policy in ("last-seen", "hermes")),
]


def opened(model, policy, folder=None, **settings):
    per_frame = model.rows_per_frame
    budget = (60 if policy.startswith("full") else 9) * per_frame
    state = None if folder is None else SnapshotWriter(folder, every=3600, notify=lambda line: None)
    session = Session.open(
        model, append="all", policy=policy, budget=budget, text_budget=TEXT_BUDGET, state=state, **{"chunk": 4, **settings}
    )
    session._stream.positions.limit = 600 if session._stream._most_text else 480
    return session


def watch(session, images):
    for image in images:
        session.watch(image)


def holds(session):
    """All that a session holds and where it stands, but for times."""
    stream, chunk = session._stream, session._chunk
    counts, waiting = chunk.state()
    policy = {name: array.copy() for name, array in stream.policy.state().items()}
    features = {name: array.copy() for name, array in waiting.items()}
    done = (
        *(getattr(stream.stats, part) for part in ("compressions", "evicted", "reindexings")),
        stream.frames,
        stream.text_ids,
    )
    return arena(stream), counts, (*done, session.time_s), policy, features, session.stats.frames, session.stats.chunks


def same(one, other):
    assert one[:3] == other[:3]
    assert one[5:] == other[5:]
    for mine, theirs in zip(one[3:5], other[3:5], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if name.startswith("store."):  # where blocks lie in each one's own file, which depends on when they were written
                continue
            np.testing.assert_array_equal(mine[name], theirs[name], name)


def tokens(session, question=ASKED, conversation=None):
    answer = session.ask(question, conversation)
    answer.wait()
    assert answer.token_ids
    return answer.token_ids


@pytest.mark.parametrize(("policy", "family", "reindexing"), dict.fromkeys(CASES))
def test_it_goes_on_as_if_it_had_not_stopped(models, tmp_path, policy, family, reindexing):
    model = models[family]
    group = model.bundle.vision.group
    before = 1 + (BEFORE - 1) * group
    images = list(frames(before + AFTER * group, model))
    with opened(model, policy, tmp_path, reindexing=reindexing) as session:
        watch(session, images[:before])
        said = tokens(session, conversation="one")
        stopped, then = holds(session), tokens(session)
    assert session.stats.snapshots == 1
    with opened(model, policy, reindexing=reindexing) as whole, opened(model, policy, tmp_path, reindexing=reindexing) as again:
        same(holds(again), stopped)
        assert stopped[1]["taken"] == 1, "in the middle of a chunk"
        watch(whole, images[:before])
        assert tokens(whole, conversation="one") == said
        assert tokens(whole) == tokens(again) == then
        for session in (whole, again):
            watch(session, images[before:-1])
        same(holds(whole), holds(again))
        assert tokens(whole, "and now?", "one") == tokens(again, "and now?", "one"), "the conversation goes on"
        for session in (whole, again):
            watch(session, images[-1:])
        same(holds(whole), holds(again))
        assert tokens(whole) == tokens(again)
        if not policy.startswith("full"):
            assert whole.stats.memory.compressions > 3


def test_frames_of_another_size_are_another_stream(models, tmp_path):
    model = models["qwen2_vl"]
    with opened(model, "last-seen", tmp_path, frame_size=(84, 56)) as session:
        watch(session, [np.zeros((84, 56, 3), np.uint8)] * 3)
    with pytest.raises(UserError, match="was written with frame size 56x84, but this run uses 84x56; run with the same") as one:
        opened(model, "last-seen", tmp_path, frame_size=(56, 84))
    assert "\n" not in str(one.value)
    with opened(model, "last-seen", tmp_path, frame_size=(82, 58)) as session:  # which is resized to the same
        assert session.stats.frames == 3


def test_what_was_resumed_and_cannot_go_on_is_one_line(model, tmp_path, monkeypatch):
    with opened(model, "h2o", tmp_path) as session:
        watch(session, frames(BEFORE, model))
    before = [path.read_bytes() for path in tmp_path.glob("*.snapshot")]
    with opened(model, "h2o", tmp_path) as session:
        watch(session, frames(1, model))
        monkeypatch.setattr(session._stream, "append_frames", lambda *_, **__: np.zeros(3)[3])
        with pytest.raises(
            SnapshotError, match=r"snapshot: the session resumed from it cannot continue \(IndexError.* move it"
        ):
            watch(session, frames(AFTER, model))
    assert [path.read_bytes() for path in tmp_path.glob("*.snapshot")] == before, "what is broken replaces nothing"


@pytest.mark.parametrize("policy", ["infinipot-v", "hybrid"])
def test_a_stream_kept_in_fp32_continues_in_fp32_when_its_bundle_keeps_fp16(model, tmp_path, policy):
    before, images = model.in_fp32(), list(frames(BEFORE + AFTER, model))
    with opened(before, policy, tmp_path) as session:
        watch(session, images[:BEFORE])
        stopped = holds(session)
    with opened(model, policy) as fresh, opened(before, policy) as whole, opened(model, policy, tmp_path) as again:
        assert (fresh.cache.dtype, again.cache.dtype) == (np.float16, np.float32)
        same(holds(again), stopped)
        watch(whole, images)
        watch(again, images[BEFORE:])
        same(holds(whole), holds(again))
        assert tokens(whole) == tokens(again)


def test_beside_another_models_fp32_snapshots_a_stream_keeps_fp16(models, model, tmp_path):
    with opened(models["qwen2_vl"].in_fp32(), "h2o", tmp_path) as session:
        watch(session, frames(BEFORE, session.model))
    state = SnapshotWriter(tmp_path, notify=lambda line: None, begin_again=True)
    with Session.open(
        model, append="all", policy="h2o", budget=9 * model.rows_per_frame, text_budget=TEXT_BUDGET, state=state
    ) as session:
        assert session.cache.dtype == np.float16


def test_snapshots_of_the_demo_by_earlier_versions_are_of_this_model():
    """The hash that commit 74dff65f wrote, when the demo kept fp32 and a chat had fewer fields."""
    earlier = "87893bcac55bc344e7e2df6a86b8ac1f84bdd2de7cc796c50c9c87502ff18575"
    assert model_hash(Bundle.load(demo_bundle()).in_fp32()) == earlier

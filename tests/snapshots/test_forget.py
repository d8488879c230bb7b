"""Forgetting what was seen in a window of time: gone from memory and disk, and the stream continues."""

import errno
from unittest.mock import Mock

import numpy as np
import pytest
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots.directory import Folder

QUESTION = "what color was the square?"
RETRIEVAL = ("rekv", "resv", "mosaic", "hybrid")
EVICTING = [name for name in POLICIES if name not in RETRIEVAL]


def spans(session):
    """First and last frame of all vision rows."""
    cache, found = session.cache, []
    for layer in range(cache.layers):
        seen = cache.kind(layer) == Kind.VISION
        found.append(np.stack([cache.frame(layer)[seen], cache.confirmed(layer)[seen]], 1))
    return np.concatenate(found)


@pytest.mark.parametrize("append", ["all", "changed"])
@pytest.mark.parametrize("policy", [*EVICTING, "snapkv:window=8", "purekv:st_spattn=on"])
def test_a_stream_goes_on_without_a_stretch_of_time(model, policy, append):
    budget = {"full": 60}.get(policy, 8) * model.bundle.vision.tokens_per_frame
    images = list(frames(40, model))
    try:
        session = Session.open(model, policy=policy, budget=budget, chunk=3, append=append)
    except UserError:
        return  # a policy that takes whole frames
    with session:
        for number, image in enumerate(images[:22]):
            session.watch(image, float(number))
        session.ask(QUESTION, "guard").wait()
        if "st_spattn" in policy:
            with pytest.raises(UserError, match="all later frames attend to the first frame"):
                session.forget(0.0, 4.0)
        assert session.forget(50.0) == 0
        assert session.forget(5.0, 20.0) > 0
        held = spans(session)
        assert not ((held[:, 0] <= 20) & (held[:, 1] >= 5)).any()
        assert (held[:, 0] > 20).any() or session._stream.present
        assert all(frame.seconds[0] == 21.0 for frame in session._stream.present)
        assert not session._memory.conversations.turns
        for number, image in enumerate(images[22:], 22):
            session.watch(image, float(number))
        assert session.ask(QUESTION).text
        assert spans(session).max() >= 38
        assert session._stream.times.newest == 39


def test_nothing_of_it_is_left_in_the_folder(model, tmp_path):
    """Bytes of a frame's keys, values and pixels, in both generations, the chunk at hand, the references and the present."""
    per_frame, images = model.bundle.vision.tokens_per_frame, list(frames(12, model))
    for append, encode in (("all", "all"), ("changed", "changed")):
        folder = tmp_path / append
        settings = {"policy": "infinipot-v", "budget": 30 * per_frame, "chunk": 4, "append": append, "encode": encode}
        with Session.open(model, state=folder, **settings) as session:
            for number, image in enumerate(images):
                session.watch(image, float(number))
            session._writer._snapshot()
            session.watch(images[0] // 2 + 7, 12.0)  # waits for others of its chunk
            session._writer._snapshot()
            cache = session.cache
            marks = [cache.key(layer)[0, cache.kind(layer)[0] == Kind.VISION][-1].tobytes() for layer in range(cache.layers)]
            marks += [cache.value(0)[0, cache.kind(0)[0] == Kind.VISION][-1].tobytes()]
            marks.append(session._chunk._pixels[0, 0, 3].tobytes())
            marks += [frame.features[0].tobytes() for frame in session._stream.present]

            def found(marks=marks, folder=folder):
                return [any(mark in path.read_bytes() for path in folder.rglob("*") if path.is_file()) for mark in marks]

            assert all(found()), "else this test shows nothing"
            assert len(list(folder.glob("*.snapshot"))) == 2
            assert session.forget() > 0
            assert not any(found())
            assert len(list(folder.glob("*.snapshot"))) == 1
            assert not len(spans(session))
            session.watch(images[3], 13.0)
            assert session.ask(QUESTION).text
        assert not any(found())
        with Session.open(model, state=folder, **settings) as again:
            assert again.stats.frames == 14
            assert again.ask(QUESTION).text


def test_an_older_snapshot_that_cannot_be_removed_is_said(model, tmp_path, monkeypatch):
    with Session.open(model, policy="infinipot-v", budget=30 * model.bundle.vision.tokens_per_frame, state=tmp_path) as session:
        for number, image in enumerate(frames(4, model)):
            session.watch(image, float(number))
        session._writer._snapshot()
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "remove", Mock(side_effect=PermissionError(errno.EROFS, "Read-only file system")))
            with pytest.raises(UserError, match="older snapshots were not deleted"):
                session.forget()
        session.forget()
        assert len(list(tmp_path.glob("*.snapshot"))) == 1


@pytest.mark.parametrize("policy", ["rekv", "hybrid"])
def test_a_policy_with_a_store_forgets_all_or_nothing(model, policy):
    with Session.open(model, policy=policy, budget=20 * model.bundle.vision.tokens_per_frame) as session:
        for number, image in enumerate(frames(30, model)):
            session.watch(image, float(number))
        with pytest.raises(UserError, match="forget --all"):
            session.forget(3.0, 5.0)
        session.watch(next(frames(1, model)), 31.0)

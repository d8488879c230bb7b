"""What the caller of a session did wrong is one line of UserError, and the session goes on."""

import hashlib
import json
import resource
import shutil
import string
from random import Random

import numpy as np
import pytest
from pictures import frames
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from edgevlm.errors import BundleError, UserError
from edgevlm.runtime.bundle import MANIFEST, seal_manifest
from edgevlm.runtime.chat import encode
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session, TextBudget

QUESTION, TEXT_BUDGET = "what color was the square?", TextBudget(16, 64, 8)


def opened(model, **settings):
    settings = {"budget": 4 * model.bundle.vision.tokens_per_frame, "chunk": 2, "text_budget": TEXT_BUDGET} | settings
    return Session.open(model, **settings)


def test_a_closed_session_says_so(model):
    session = Session.open(model.bundle.path, budget=4 * model.bundle.vision.tokens_per_frame)
    image = next(frames(1, model))
    session.watch(image)
    session.close()
    for use in (lambda: session.ask(QUESTION), lambda: session.watch(image), session.flush):
        with pytest.raises(UserError, match="the session is closed"):
            use()
    session.close()
    assert session.stats.frames == 1


def test_a_model_that_opening_loaded_is_closed_when_opening_fails(model, monkeypatch):
    closed, path = [], model.bundle.path
    monkeypatch.setattr(Model, "close", lambda self: closed.append(self))
    with pytest.raises(UserError, match="less than one frame"):
        Session.open(path, budget=1)
    assert len(closed) == 1
    with pytest.raises(UserError, match="less than one frame"):
        Session.open(model, budget=1)
    assert len(closed) == 1, "one that was given stays open"
    monkeypatch.setattr(Model, "load", lambda *_: pytest.fail("nothing is loaded for a policy that there is not"))
    with pytest.raises(UserError, match="did you mean"):
        Session.open(path, policy="infinipot")


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), 10**400, "3", True])
def test_a_time_that_is_none_takes_nothing_in(model, timestamp):
    with opened(model) as session:
        image = next(frames(1, model))
        for use in (lambda: session.watch(image, timestamp), lambda: session.skip(timestamp)):
            with pytest.raises(UserError, match="timestamp must be a number of seconds, not"):
                use()
        assert session.stats.frames == 0
        session.watch(image)
        assert session.ask(QUESTION).time_s == 0.0, "the first frame, whose time is its number"


@pytest.mark.parametrize(
    ("shape", "says"),
    [((30_000, 30_000, 3), "30000x30000 is too large; at most 67,108,864 pixels"), ((0, 5, 3), r"not uint8 \[0, 5, 3\]")],
)
def test_a_frame_of_too_many_pixels_or_none_takes_nothing_in(model, shape, says):
    with opened(model) as session:
        with pytest.raises(UserError, match=says):
            session.watch(np.broadcast_to(np.uint8(3), shape))
        assert session.stats.frames == 0


@pytest.mark.parametrize("policy", ["infinipot-v", "sliding-window"])
@pytest.mark.parametrize("budget", [-5, 0, 1])
def test_a_budget_of_less_than_a_frame_is_refused(model, policy, budget):
    with pytest.raises(UserError, match=f"a budget of {budget} tokens is less than .*; give a larger --budget"):
        opened(model, policy=policy, budget=budget)


def test_what_cannot_be_asked(model):
    with opened(model) as session:
        for image in frames(2, model):
            session.watch(image, timestamp=3)
        for settings, says in [
            ({"temperature": float("nan")}, "temperature"),
            ({"max_tokens": 0}, "1 to 8 tokens"),
            ({"max_tokens": 2.5}, "max_tokens must be an integer, not 2.5"),
            ({"seed": 1.5}, "seed must be an integer, not 1.5"),
        ]:
            with pytest.raises(UserError, match=says):
                session.ask(QUESTION, **settings)
        with pytest.raises(UserError, match=r"'\\udce9', which is not valid Unicode"):
            session.ask("caf\udce9")
        with pytest.raises(UserError, match="a question must be text, not int"):
            session.ask(3)
        with pytest.raises(UserError, match=r"a frame must be a numpy array.*not list"):
            session.watch([[[0, 0, 0]]])
        greedy = session.ask(QUESTION, "one", max_tokens=4)
        assert greedy.text == session.ask(QUESTION, temperature=1e-320, max_tokens=4).text
        assert greedy.time_s == 3
        assert list(session._memory.conversations.turns) == ["one"]


def test_time_does_not_run_backwards(model):
    with opened(model) as session:
        first, second, third = frames(3, model)
        session.watch(first, 3)
        for earlier in (1, None):  # the frame's number, 1, comes before 3 s as well
            with pytest.raises(UserError, match="1 s is before 3 s"):
                session.watch(second, earlier)
        with pytest.raises(UserError, match="2 s is before 3 s"):
            session.skip(2)
        session.watch(second, 3)
        session.watch(third, 4)
        assert (session.stats.frames, session.time_s) == (3, 4)


def spoiled(model, folder, content):
    """A bundle whose tokenizer.json is this, as its manifest says."""
    shutil.copytree(model.bundle.path, folder)
    data = json.dumps(content).encode()
    (folder / "tokenizer.json").write_bytes(data)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["tokenizer.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_bytes(seal_manifest(manifest))
    return folder


def tokenizer(**model):
    return {"version": "1.0", "added_tokens": [], "model": model}


def test_a_tokenizer_that_panics_or_takes_gigabytes_is_one_line(model, tmp_path):
    letters = Random(0)
    long = [["".join(letters.choices(string.ascii_letters, k=1000)), -1.0] for _ in range(6000)]
    fat = tokenizer(type="Unigram", unk_id=0, vocab=[["?", 0.0], *long])  # 6 MB, of which the library makes 2 GB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=r"tokenizer\.json: cannot be read \(loading exceeds the limit of 60 s or \d+ MB\)"):
        Model.load(spoiled(model, tmp_path / "fat", fat))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    with pytest.raises(BundleError, match=r"tokenizer\.json: cannot be read \('range end index") as panic:
        Model.load(spoiled(model, tmp_path / "panics", tokenizer(type="BPE", vocab={"a": 0, "b": 1}, merges=[["a", "b"]])))
    assert "\n" not in str(panic.value)
    with pytest.raises(UserError, match=r"cannot encode this text \(WordLevel error: Missing \[UNK\]"):
        encode(Tokenizer(WordLevel({"a": 0}, unk_token="?")), "b")

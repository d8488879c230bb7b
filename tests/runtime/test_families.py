"""Every policy on the families whose frames are more than rows: within its cap, and keys where the positions say."""

from __future__ import annotations

import itertools
from contextlib import closing

import numpy as np
import pytest
import torch
from hf import load
from memory import rows_of
from more_checkpoints import FRAME, make_more
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.session import Session

TEXT_BUDGET = TextBudget(16, 64, 16)
QUESTION = "what color was the square?"
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=[*MROPE, "smolvlm"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return make_more(tmp_path_factory.mktemp(family) / "checkpoint", family, num_hidden_layers=4)


@pytest.fixture(scope="module")
def model(checkpoint):
    loaded = Model.load(export_checkpoint(checkpoint, checkpoint.parent / "bundle", camera=FRAME, kv="fp32"), threads=1)
    yield loaded
    loaded.close()


def opened(model, policy, chunk=4, append="all", **settings):
    return Session.open(model, policy=policy, budget=4 * 50, chunk=chunk, append=append, text_budget=TEXT_BUDGET, **settings)


def held(session):
    """All of a memory but free rows, as bytes, and where the next row goes."""
    cache = session.cache
    parts = [part(layer) for layer in range(cache.layers) for part in (cache.key, cache.value, cache.seq, cache.position)]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts), session._stream.positions.mark()


BOUNDED = sorted(set(POLICIES) - {"full"})
CASES = [("qwen3_vl", policy) for policy in BOUNDED]  # with text between frames, on three axes
CASES += itertools.product(("smolvlm", "qwen2_vl"), ("infinipot-v", "hermes", "mosaic", "resv"))  # on one; without text


@pytest.mark.parametrize(("family", "policy"), CASES, indirect=["family"], scope="module")
def test_every_policy_keeps_within_its_cap(model, policy):
    with opened(model, policy) as session:
        stream = session._stream
        caps = stream.prefix + stream.policy.layer_budgets
        for index, image in enumerate(frames(50, model)):
            session.watch(image, index / 2)
            assert (session.cache.lengths <= caps).all()
        assert session.stats.memory.compressions > 3
        session.flush()
        before = held(session)
        answer = session.ask(QUESTION, max_tokens=8)
        answer.wait()
        assert held(session) == before
        for layer in range(session.cache.layers):
            check_text(session.cache, layer)


@pytest.mark.parametrize("append", ["all", "changed:refresh=1"])
def test_simple_stream_keeps_the_last_frames_whole_with_their_text(model, append):
    """Where only what changed enters, the present is the third; here all changes, in every frame."""
    with opened(model, "simple-stream:k=3", append=append) as session:
        for index, image in enumerate(frames(24, model)):
            session.watch(image, index / 2)
        session.flush()
        newest = 24 // model.bundle.vision.group - 1
        last = [newest - 2, newest - 1, newest] if append == "all" else [newest - 2, newest - 1]
        for layer in range(session.cache.layers):
            kind, frame = session.cache.kind(layer)[0], session.cache.frame(layer)[0]
            shown, counts = np.unique(frame[kind == Kind.VISION], return_counts=True)
            assert (shown.tolist(), set(counts.tolist())) == (last, {model.bundle.vision.tokens_per_frame})
            check_text(session.cache, layer)


def check_text(cache, layer):
    """Text of a frame is there as long as a token of it, and not longer."""
    kind, frame = cache.kind(layer), cache.frame(layer)
    text, vision = frame[(kind == Kind.TEXT)], set(frame[kind == Kind.VISION].tolist())
    assert set(text.tolist()) <= vision
    counts = {number: int((text == number).sum()) // cache.kv_heads for number in set(text.tolist())}
    assert not counts or vision == set(counts)
    assert not counts or min(counts.values()) > 3


def test_a_question_in_the_middle_of_a_group_leaves_no_trace(model):
    images = list(frames(23, model))
    memories = []
    for asks in (False, True):
        with opened(model, "sliding-window", chunk=6) as session:
            for index, image in enumerate(images):
                session.watch(image, index / 2)
                if asks and index in (0, 3, 8, 14):
                    session.ask(QUESTION, max_tokens=4).wait()
            session.flush()
            memories.append(held(session))
    assert memories[0] == memories[1]


def test_what_changed_in_a_chunk_enters_as_frame_by_frame(model, family):
    """Text around what changed alone, at the same positions, made dense at the same frames; a question leaves no trace."""
    group, memories = model.bundle.vision.group, []
    for chunk, asked in ((group, ()), (4 * group, ()), (4 * group, (4, 13, 14, 23))):
        with opened(model, "last-seen", chunk, append="changed:tau=0.9999") as session:
            stream = session._stream
            stream.positions.limit = (
                stream.prefix + stream.positions.text_rows + {"qwen2_vl": 30, "qwen2_5_vl": 80}.get(family, 300)
            )
            for index, image in enumerate(frames(32 * group, model)):
                session.watch(image, 2.0 * index)
                if index in asked:
                    session.ask(QUESTION, max_tokens=4).wait()
            assert session.stats.memory.reindexings >= 1
            assert session.stats.memory.appended < 1
            counted = stream.stats.compressions, stream.stats.reindexings, stream.positions.mark(), stream.stats.tokens_appended
            memories.append((counted, *rows_of(stream)))
    for counted, known, content in memories[1:]:
        assert counted == memories[0][0]
        for mine, theirs in zip(known, memories[0][1], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for mine, theirs in zip(content, memories[0][2], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
    for mine, theirs in zip(memories[1][2], memories[2][2], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("policy", "reindexing"), [("infinipot-v", "lazy"), ("hermes", "eager"), ("uniform", "lazy")])
def test_keys_are_those_of_transformers_at_the_new_positions(model, checkpoint, family, policy, reindexing):
    """Layer 0 sees nothing but a row's own embedding: its keys are the projection of that, rotated to where it now is."""
    oracle = load(checkpoint, family)
    text = oracle.model.text_model if family == "smolvlm" else oracle.model.language_model
    layer, embeds = text.layers[0], {}
    with opened(model, policy, reindexing=reindexing) as session:
        stream = session._stream
        stream.positions.limit = stream.prefix + stream.positions.text_rows + (80 if family.startswith("qwen2") else 300)
        append = stream.append

        def recorded(rows, *arguments):
            first = stream._seq
            embeds.update((first + index, row[: model.bundle.decoder.hidden].copy()) for index, row in enumerate(rows))
            return append(rows, *arguments)

        stream.append = recorded
        for index, image in enumerate(frames(200, model)):
            session.watch(image, index / 2)
        assert session.stats.memory.reindexings >= 2
        cache = session.cache
        for head in range(cache.kv_heads):
            kept = np.flatnonzero(np.isin(cache.kind(0)[head], (Kind.VISION, Kind.TEXT)))
            rows = torch.from_numpy(np.stack([embeds[seq] for seq in cache.seq(0)[head][kept].tolist()]))
            place = torch.from_numpy(cache.position(0)[head][kept].astype(np.int64)).T  # [axes, n]
            keys = transformers_keys(text, layer, rows, place)[head]
            assert float((keys - torch.from_numpy(cache.key(0)[head][kept].copy())).abs().max()) < 2e-4
            assert cache.position(0)[head].max() < stream.positions.next <= stream.positions.limit - TEXT_BUDGET.question


def transformers_keys(text, layer, rows, place):
    """Keys ``[kv_heads, n, head_dim]`` of rows ``[n, hidden]`` at positions ``[axes, n]``."""
    with torch.no_grad():
        keys = layer.self_attn.k_proj(layer.input_layernorm(rows)).unflatten(-1, (-1, layer.self_attn.head_dim))
        if hasattr(layer.self_attn, "k_norm"):
            keys = layer.self_attn.k_norm(keys)
        cos, sin = text.rotary_emb(rows, place[:, None] if len(place) == 3 else place)
        first, second = keys.chunk(2, -1)
        turned = keys * cos[0][:, None] + torch.cat([-second, first], -1) * sin[0][:, None]
    return turned.transpose(0, 1)


def test_a_question_cannot_bring_a_video_of_its_own(model):
    place = model.tokenizer.id_to_token(model.bundle.chat.placeholder_id)
    with opened(model, "uniform") as session, pytest.raises(UserError, match="cannot contain"):
        session.ask(f"what is {place}?")


@pytest.mark.parametrize("family", MROPE, indirect=True)
def test_sessions_of_one_model_watch_frames_of_their_own_shape(checkpoint, model, tmp_path):
    """As models exported for that shape do, to the token; all at once, and each within its cap."""
    shapes = ((56, 84), (112, 42), (70, 70))
    random = np.random.default_rng(0)
    images = {shape: random.integers(0, 256, (12, *shape, 3), np.uint8) for shape in shapes}

    def answer(session, seen):
        for image in seen:
            session.watch(image)
        said = session.ask(QUESTION, max_tokens=8)
        said.wait()
        return said.token_ids

    sessions = {shape: opened(model, "last-seen", frame_size=shape) for shape in shapes}
    for shape, session in sessions.items():
        with session:
            own = session.model.bundle.vision
            assert own.size == shape
            assert own.tokens_per_frame == own.grid[0] * own.grid[1] == shape[0] * shape[1] // 14**2
            said = answer(session, images[shape])
            assert session.cache.lengths.max() <= session._stream.prefix + session.budget
            with pytest.raises(UserError, match="were prepared for another model"):
                session.watch(sessions[shapes[shape == shapes[0]]].prepare(images[shape][0]))
        made = Model.load(export_checkpoint(checkpoint, tmp_path / f"{shape[0]}", camera=shape, kv="fp32"), threads=1)
        with closing(made), opened(made, "last-seen") as alone:
            assert alone.model.bundle.vision.size == shape
            assert answer(alone, images[shape]) == said
    assert model.bundle.vision.size == FRAME


@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
@pytest.mark.parametrize(
    ("size", "says"),
    [
        ((0, 640), "frames of 640 x 0 pixels are not supported"),
        ((1, 640), "aspect ratio of at most 200"),
        ((480.0, 640), "frame_size must be"),
        ("640x480", "frame_size must be"),
    ],
)
def test_frame_sizes_that_are_none(model, size, says):
    with pytest.raises(UserError, match=says):
        opened(model, "last-seen", frame_size=size)

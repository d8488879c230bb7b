"""``mode=official`` against what the authors' program kept of the same frames (``recorded/hermes.py``), and its sessions."""

from pathlib import Path

import checkpoints
import numpy as np
import pytest
from pictures import frames
from policies.filled import DIM, HEADS, PREFIX, Filled
from policies.recorded import hermes as recorded

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Guidance, StreamShape, create_policy
from edgevlm.runtime.policies.hermes import normalised
from edgevlm.runtime.session import Session, TextBudget

RECORDED = np.load(Path(__file__).parent / "recorded" / "hermes.npz")
TEXT_BUDGET, BUDGET = TextBudget(16, 64, 8), 38


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Ten layers, one shallow, six middle, three deep."""
    folder = tmp_path_factory.mktemp("official")
    made = Model.load(export_checkpoint(checkpoints.make_deep(folder / "checkpoint"), folder / "bundle"), threads=1)
    yield made
    made.close()


@pytest.mark.parametrize("name", recorded.CASES)
def test_keeps_what_the_program_kept(name, tmp_path):
    """Its rows in every layer after every compression, in their order, exactly; its summaries but for float32's rounding."""
    case = recorded.CASES[name]
    rows, summaries, prompts = (RECORDED[f"{name}: {part}"] for part in ("rows", "summaries", "prompts"))
    model = Model.load(export_checkpoint(case.checkpoint(tmp_path / "checkpoint"), tmp_path / "bundle"), threads=1)
    with Session.open(
        model, policy="hermes:mode=official", budget=case.budget, chunk=case.frames, text_budget=TEXT_BUDGET
    ) as session:
        stream, policy = session._stream, session._stream.policy
        assert (session._chat.prefix, model.bundle.vision.tokens_per_frame) == (recorded.PREFIX, recorded.PER_FRAME)
        for number, chunk in enumerate(case.features()):
            guidance, before = policy.needs.guidance, stream.stats.compressions
            assert stream.append_frames(chunk) == len(chunk)
            if stream.stats.compressions > before:
                _, overall, both = prompts[before]
                assert guidance == (overall, both)
                for layer, expected in enumerate(rows[before]):
                    check_layer(stream, layer, expected, summaries[: before + 1, max(0, layer - case.deep_from)])
            if number + 1 == case.chunks // 2 and case.turn:
                policy.answered(*case.turn)
        assert stream.stats.compressions == stream.stats.reindexings == len(rows)
    model.close()


def check_layer(stream, layer, expected, summaries):
    """expected: rows of the vision from the stream's start, summaries as -1, -2, ...; summaries: the layer's so far."""
    cache, prefix = stream.cache, stream.prefix
    order = np.argsort(cache.position(layer)[0, :, 0])
    assert cache.position(layer)[0, order, 0].tolist() == list(range(prefix + len(expected)))
    seq, kind = cache.seq(layer)[:, order[prefix:]], cache.kind(layer)[:, order[prefix:]]
    vision = expected >= 0
    assert (kind == np.where(vision, Kind.VISION, Kind.SUMMARY)).all()
    assert (seq[:, vision] == prefix + expected[vision]).all()
    if not vision.all():
        keys, values = (of[:, order[prefix:]][:, ~vision] for of in (cache.key(layer), cache.value(layer)))
        theirs = summaries[-1 - expected[~vision]]  # keys turn with their row, so only that of the newest is as it was
        np.testing.assert_allclose(values, theirs[:, 1].swapaxes(0, 1), atol=1e-4)
        np.testing.assert_allclose(keys[:, -1], theirs[-1, 0], atol=1e-4)


def test_the_last_turn_matters(model):
    """The same frames, and another memory after a question: only in this mode."""
    kept = {}
    for policy in ("hermes:mode=official", "hermes"):
        for asks in (False, True):
            with Session.open(model, policy=policy, budget=BUDGET, chunk=2, text_budget=TEXT_BUDGET) as session:
                for index, image in enumerate(frames(20, model)):
                    session.watch(image)
                    if asks and index == 7:
                        session.ask("what color was it?", max_tokens=4).wait()
                cache = session._stream.cache
                kept[policy, asks] = [sorted(cache.seq(layer)[0].tolist()) for layer in range(10)]
    assert kept["hermes", False] == kept["hermes", True]
    assert kept["hermes:mode=official", False] != kept["hermes:mode=official", True]


def test_the_arena_holds_a_chunk_more_and_not_a_byte_is_allocated_later(model):
    per_frame = model.bundle.vision.tokens_per_frame
    for chunk in (1, 3, 5):
        with Session.open(model, policy="hermes:mode=official", budget=BUDGET, chunk=chunk, text_budget=TEXT_BUDGET) as session:
            stream = session._stream
            cache, step, held, after = stream.cache, stream.decoder.step, [], []
            nbytes, ahead = cache.nbytes, chunk * per_frame
            assert (cache.capacities == stream.prefix + BUDGET + ahead + stream.positions.text_rows).all()

            def watch_step(embeds, cos, sin, past_len, logit_rows=(-1,), step=step, held=held):
                held.append(int(past_len.max()) + len(embeds))
                return step(embeds, cos, sin, past_len, logit_rows)

            stream.decoder.step = watch_step
            for image in frames(33, model):
                session.watch(image)
                after.append(int(cache.lengths.max()))
            session.flush()
            assert stream.prefix + BUDGET < max(held) <= stream.prefix + BUDGET + ahead
            assert max(after) == stream.prefix + BUDGET
            assert (cache.nbytes, cache.allocations) == (nbytes, 1)
            assert stream.frames == 33


def test_a_deep_layer_gathers_summaries_that_can_go_again(model):
    with Session.open(model, policy="hermes:mode=official", budget=BUDGET, chunk=2, text_budget=TEXT_BUDGET) as session:
        for image in frames(40, model):
            session.watch(image)
        cache, compressions = session._stream.cache, session.stats.memory.compressions
        counts = [int((cache.kind(layer)[0] == Kind.SUMMARY).sum()) for layer in range(10)]
    assert counts[:7] == [0] * 7
    assert all(1 <= count <= compressions for count in counts[7:])


def test_questions_leave_no_rows_behind(model):
    with Session.open(model, policy="hermes:mode=official", budget=BUDGET, chunk=2, text_budget=TEXT_BUDGET) as session:
        for image in frames(20, model):
            session.watch(image)
        stream = session._stream
        before = stream.cache.lengths.tolist(), stream.positions.next, stream._seq, stream.cache.key(9).copy()
        session.ask("what color was it?", max_tokens=4).wait()
        stream._guide()
        after = stream.cache.lengths.tolist(), stream.positions.next, stream._seq, stream.cache.key(9)
        assert before[:3] == after[:3]
        np.testing.assert_array_equal(before[3], after[3])


def test_one_prompt_serves_all_layers(model):
    with Session.open(
        model,
        policy="hermes:mode=official,local_prompt=,global_prompt=What happens in the video?",
        budget=BUDGET,
        text_budget=TEXT_BUDGET,
    ) as session:
        assert session._stream.policy.needs.guidance == ("What happens in the video?",)
        for image in frames(24, model):
            session.watch(image)
        assert session.stats.memory.compressions


def test_what_it_runs_on_and_what_it_cannot(model):
    with Session.open(model, policy="hermes:mode=official", budget=BUDGET, text_budget=TEXT_BUDGET) as session:
        assert session.basis == "hermes: mode=official: middle from layer 1, deep from 7"
        assert session._stream.policy.needs.raw_layers == tuple(range(1, 10))
        assert not session._stream.probe_text(model.engine.embed(np.array([1]))), "frames and answers pay for no queries"
    with pytest.raises(UserError, match=r"limit of 2048 positions \(prefix \d+, text budget \d+, a chunk of 800\)"):
        Session.open(model, policy="hermes:mode=official", budget=1200, chunk=200, text_budget=TEXT_BUDGET)
    policy = create_policy("hermes:mode=official,summary=on")
    assert (policy.join, policy.summary) == ("rank", "last")
    assert create_policy("hermes:mode=official,summary=off").summary == "off"


def test_a_bundle_of_an_older_export_is_refused_at_once(model):
    older = Model.load(model.bundle.path, threads=1)
    del older.bundle.decoder.graphs["projections"]
    with pytest.raises(UserError, match=r"has no projections decoder graph .*; export the checkpoint again") as caught:
        Session.open(older, policy="hermes:mode=official", budget=BUDGET, text_budget=TEXT_BUDGET)
    assert "\n" not in str(caught.value)
    Session.open(older, policy="hermes", budget=BUDGET, text_budget=TEXT_BUDGET).close()
    older.close()


@pytest.mark.usefixtures("kv")
def test_min_max_adds_what_the_program_adds():
    """Which shows where attention hardly differs: the scores stay away from 1."""
    scores = np.array([0.25, 0.25 + 1e-6, 0.25 + 3e-6])
    np.testing.assert_allclose(normalised(scores, 1e-6), [0, 0.25, 0.75], atol=1e-9)
    filled = Filled(10, 60, (2, 2), np.random.default_rng(0))
    for _ in range(5):
        filled.frame()
    queries = {layer: np.full((4, 3, DIM), 1e-6, np.float32) for layer in range(1, 10)}
    guidance = Guidance(queries, {layer: queries[layer][:HEADS] for layer in queries}, (2, 1))
    highest = {}
    for mode in ("official", "streaming"):
        policy = create_policy(f"hermes:mode={mode}")
        policy.attach(12, StreamShape(10, 4, PREFIX))
        highest[mode] = policy._score(filled.cache, 9, policy._tokens(filled.cache, 9), guidance).max()
    assert highest["streaming"] == 1
    assert 0 < highest["official"] < 0.9

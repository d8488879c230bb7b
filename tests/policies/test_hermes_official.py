"""``mode=official`` against the authors' program as a float64 reference has it, session by session."""

import checkpoints
import numpy as np
import pytest
from pictures import frames
from policies.filled import DIM, HEADS, PREFIX, Filled
from policies.reference_hermes_official import Program
from reference_decoder import ReferenceDecoder

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Guidance, StreamShape, create_policy
from edgevlm.runtime.policies.hermes import normalised
from edgevlm.runtime.session import Session, TextBudget

TEXT_BUDGET, BUDGET = TextBudget(16, 64, 8), 38


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Ten layers, one shallow, six middle, three deep: the model and its checkpoint."""
    folder = tmp_path_factory.mktemp("official")
    checkpoint = checkpoints.make_deep(folder / "checkpoint")
    model = Model.load(export_checkpoint(checkpoint, folder / "bundle"), threads=1)
    yield model, checkpoint
    model.close()


def watched(made, session, program):
    """The session's stream tells the program what is appended."""
    stream = session._stream
    append_frames = stream.append_frames

    def both(features, coming, seconds):
        appended = append_frames(features, coming, seconds)
        if appended:
            assert appended == len(features)
            program.chunk(features.reshape(-1, features.shape[-1]).astype(np.float64))
        return appended

    stream.append_frames = both
    return stream


def check_memory(stream, program):
    cache = stream.cache
    assert stream.positions.next == program.next
    for layer in range(cache.layers):
        for head, expected in enumerate(program.decoder.cache[layer]):
            order = np.argsort(cache.position(layer)[head, :, 0])
            assert cache.position(layer)[head, order, 0].tolist() == expected.positions.tolist()
            np.testing.assert_allclose(cache.value(layer)[head, order], expected.values, atol=1e-4)
            keys = program.decoder._rotate(expected.keys, expected.positions)
            np.testing.assert_allclose(cache.key(layer)[head, order], keys, atol=1e-4)


@pytest.mark.parametrize(("chunk", "settings", "count"), [(4, "", 28), (1, ",summary=off", 18)])
def test_the_memory_is_the_programs(made, chunk, settings, count):
    """Row by row over many compressions, with a question on the way that enters the prompts of those after it."""
    model, checkpoint = made
    with Session.open(
        model, policy=f"hermes:mode=official{settings}", budget=BUDGET, chunk=chunk, text_budget=TEXT_BUDGET
    ) as session:
        prefix = model.encode(session._chat.prefix)
        program = Program(ReferenceDecoder(checkpoint), model.encode, prefix, BUDGET, summary=not settings)
        stream = watched(made, session, program)
        for index, image in enumerate(frames(count, model)):
            session.watch(image)
            if index == 13:
                answer = session.ask("what color was it?", max_tokens=4)
                program.last_turn = "what color was it?", answer.text
        check_memory(stream, program)
        assert stream.stats.compressions == stream.stats.reindexings == program.compressions >= 5
        prompts = stream.policy.needs.guidance
        assert prompts == program.prompts()[:0:-1]
        assert prompts[0].startswith("Context summary: Question: what color was it? Answer: ")


def test_the_last_turn_matters(made):
    """The same frames, and another memory after a question: only in this mode."""
    model, kept = made[0], {}
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


def test_the_arena_holds_a_chunk_more_and_not_a_byte_is_allocated_later(made):
    model = made[0]
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


def test_a_deep_layer_gathers_summaries_that_can_go_again(made):
    model = made[0]
    with Session.open(model, policy="hermes:mode=official", budget=BUDGET, chunk=2, text_budget=TEXT_BUDGET) as session:
        for image in frames(40, model):
            session.watch(image)
        cache, compressions = session._stream.cache, session.stats.memory.compressions
        counts = [int((cache.kind(layer)[0] == Kind.SUMMARY).sum()) for layer in range(10)]
    assert counts[:7] == [0] * 7
    assert all(1 <= count <= compressions for count in counts[7:])


def test_questions_leave_no_rows_behind(made):
    model = made[0]
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


def test_one_prompt_serves_all_layers(made):
    with Session.open(
        made[0],
        policy="hermes:mode=official,local_prompt=,global_prompt=What happens in the video?",
        budget=BUDGET,
        text_budget=TEXT_BUDGET,
    ) as session:
        assert session._stream.policy.needs.guidance == ("What happens in the video?",)
        for image in frames(24, made[0]):
            session.watch(image)
        assert session.stats.memory.compressions


def test_what_it_runs_on_and_what_it_cannot(made, tmp_path):
    model = made[0]
    with Session.open(model, policy="hermes:mode=official", budget=BUDGET, text_budget=TEXT_BUDGET) as session:
        assert session.basis == "hermes: mode=official: middle from layer 1, deep from 7"
        assert session._stream.policy.needs.raw_layers == tuple(range(1, 10))
        assert not session._stream.probe_text(model.engine.embed(np.array([1]))), "frames and answers pay for no queries"
    with pytest.raises(UserError, match=r"limit of 2048 positions \(prefix \d+, text budget \d+, a chunk of 800\)"):
        Session.open(model, policy="hermes:mode=official", budget=1200, chunk=200, text_budget=TEXT_BUDGET)
    policy = create_policy("hermes:mode=official,summary=on")
    assert (policy.join, policy.summary) == ("rank", "last")


def test_a_bundle_of_an_older_export_is_refused_at_once(made):
    older = Model.load(made[0].bundle.path, threads=1)
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

"""HERMES's own program: what it kept of the same frames (``recorded/hermes.py``), and sessions that do as it does."""

from pathlib import Path

import checkpoints
import numpy as np
import pytest
from parity.official import OfficialHermes
from parity.recorded import hermes as recorded
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
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
        model, policy=OfficialHermes(), budget=case.budget, chunk=case.frames, text_budget=TEXT_BUDGET
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
    for policy in ("hermes-official", "hermes"):
        for asks in (False, True):
            with Session.open(
                model,
                policy=OfficialHermes() if policy != "hermes" else policy,
                budget=BUDGET,
                chunk=2,
                text_budget=TEXT_BUDGET,
            ) as session:
                for index, image in enumerate(frames(20, model)):
                    session.watch(image)
                    if asks and index == 7:
                        session.ask("what color was it?", max_tokens=4).wait()
                cache = session._stream.cache
                kept[policy, asks] = [sorted(cache.seq(layer)[0].tolist()) for layer in range(10)]
    assert kept["hermes", False] == kept["hermes", True]
    assert kept["hermes-official", False] != kept["hermes-official", True]


def test_the_arena_holds_a_chunk_more_and_not_a_byte_is_allocated_later(model):
    per_frame = model.bundle.vision.tokens_per_frame
    for chunk in (1, 3, 5):
        with Session.open(model, policy=OfficialHermes(), budget=BUDGET, chunk=chunk, text_budget=TEXT_BUDGET) as session:
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
    with Session.open(model, policy=OfficialHermes(), budget=BUDGET, chunk=2, text_budget=TEXT_BUDGET) as session:
        for image in frames(40, model):
            session.watch(image)
        cache, compressions = session._stream.cache, session.stats.memory.compressions
        counts = [int((cache.kind(layer)[0] == Kind.SUMMARY).sum()) for layer in range(10)]
    assert counts[:7] == [0] * 7
    assert all(1 <= count <= compressions for count in counts[7:])


def test_questions_leave_no_rows_behind(model):
    with Session.open(model, policy=OfficialHermes(), budget=BUDGET, chunk=2, text_budget=TEXT_BUDGET) as session:
        for image in frames(20, model):
            session.watch(image)
        stream = session._stream
        before = stream.cache.lengths.tolist(), stream.positions.next, stream._seq, stream.cache.key(9).copy()
        session.ask("what color was it?", max_tokens=4).wait()
        stream._guide()
        after = stream.cache.lengths.tolist(), stream.positions.next, stream._seq, stream.cache.key(9)
        assert before[:3] == after[:3]
        np.testing.assert_array_equal(before[3], after[3])


def test_frames_and_answers_pay_for_no_queries(model):
    with Session.open(model, policy=OfficialHermes(), budget=BUDGET, text_budget=TEXT_BUDGET) as session:
        assert session._stream.policy.needs.raw_layers == tuple(range(1, 10))
        assert not session._stream.probe_text(model.engine.embed(np.array([1])))
    with pytest.raises(UserError, match=r"limit of 2048 positions \(prefix \d+, text budget \d+, a chunk of 800\)"):
        Session.open(model, policy=OfficialHermes(), budget=1200, chunk=200, text_budget=TEXT_BUDGET)


def test_a_bundle_of_an_older_export_is_refused_at_once(model):
    older = Model.load(model.bundle.path, threads=1)
    del older.bundle.decoder.graphs["projections"]
    with pytest.raises(UserError, match=r"has no projections decoder graph .*; export the checkpoint again") as caught:
        Session.open(older, policy=OfficialHermes(), budget=BUDGET, text_budget=TEXT_BUDGET)
    assert "\n" not in str(caught.value)
    Session.open(older, policy="hermes", budget=BUDGET, text_budget=TEXT_BUDGET).close()
    older.close()

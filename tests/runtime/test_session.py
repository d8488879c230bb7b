"""A session on tiny random models: answers against transformers, the cap, and that questions leave no trace."""

import ctypes
import itertools
import multiprocessing
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from memory import arena
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.session import Session, TextBudget

QUESTION = "what color was the square?"


def hf_greedy(checkpoint, family, images, prompt_ids, per_frame, count):
    """Greedy tokens of one transformers forward over prefix, all frames and the question."""
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    pixels = torch.from_numpy(np.stack(images).astype(np.float32).transpose(0, 3, 1, 2) / 255 * 2 - 1)
    if family == "llava":
        place, inputs, rows = hf.config.image_token_id, {"pixel_values": pixels}, len(images) * per_frame
    else:
        place, inputs, rows = (
            hf.config.video_token_id,
            {"pixel_values_videos": pixels[None]},
            len(images) * per_frame + 1,
        )
    index = prompt_ids.index(place)
    ids = torch.tensor([prompt_ids[:index] + [place] * rows + prompt_ids[index + 1 :]])
    with torch.no_grad():
        out = hf.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("family", ["llava_onevision", "llava"], indirect=True, scope="session")
def test_full_answers_as_transformers_does(model, checkpoint, family, chunk):
    images = list(frames(17, model))
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(
        model, append="all", policy="full", budget=20 * per_frame, chunk=chunk, text_budget=TextBudget(32, 64, 32)
    ) as session:
        for image in images:
            session.watch(image)
        answer = session.ask(QUESTION, max_tokens=16)
        answer.wait()
        chat = session._chat
        prompt = [*chat.prefix, model.bundle.chat.placeholder_id, *chat.suffix([], QUESTION)]
    expected = hf_greedy(checkpoint, family, images, prompt, per_frame, 16)
    stops = model.bundle.chat.stop_ids
    assert answer.token_ids == [token for token in expected if token not in stops]
    assert len(answer.token_ids) > 3


BOUNDED = [
    "infinipot-v", "sliding-window", "streaming-llm", "simple-stream", "uniform", "random", "snapkv:window=8", "h2o",
]  # fmt: skip


@pytest.mark.parametrize(("policy", "chunk"), zip(BOUNDED, itertools.cycle((3, 8, 1)), strict=False))
def test_the_cap_holds_inside_every_chunk_size(model, policy, chunk):
    per_frame = model.bundle.vision.tokens_per_frame
    budget = 5 * per_frame + 3
    with Session.open(
        model, append="all", policy=policy, budget=budget, chunk=chunk, text_budget=TextBudget(16, 64, 8)
    ) as session:
        stream = session._stream
        step, seen = stream.decoder.step, []

        def watched(embeds, cos, sin, past_len, *rest, step=step, seen=seen, **others):
            seen.append(int(past_len.max()) + len(embeds))
            return step(embeds, cos, sin, past_len, *rest, **others)

        stream.decoder.step = watched
        for image in frames(21, model):
            session.watch(image)
        session.flush()
        assert max(seen) <= stream.prefix + budget
        assert max(seen) > stream.prefix + budget - 2 * per_frame - 3, "the budget is used"
        assert session.stats.memory.compressions > 0
        assert stream.frames == 21


def test_reindexing_keeps_positions_below_the_limit_and_is_needed(model):
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(model, append="all", budget=8 * per_frame, chunk=4, text_budget=TextBudget(16, 64, 8)) as session:
        stream = session._stream
        stream.positions.limit, highest = 500, 0
        for image in frames(300, model):
            session.watch(image)
            highest = max(highest, stream.positions.next)
        assert session.stats.memory.reindexings >= 3
        assert 500 // 2 < highest <= 500 - stream.positions.margin
        for layer in range(stream.cache.layers):
            position, kind = stream.cache.position(layer)[..., 0], stream.cache.kind(layer)
            assert (position[kind == Kind.PREFIX] < stream.prefix).all()
            for head in range(stream.cache.kv_heads):
                assert len(np.unique(position[head])) == len(position[head])
                order = np.argsort(stream.cache.seq(layer)[head])
                assert (np.diff(position[head][order]) > 0).all(), "positions follow the stream's order"


def test_the_same_frames_give_the_same_answer_however_threads_fall(model):
    """One thread watches, others ask: every answer is that of some chunk boundary, and none is lost."""
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(model, append="all", budget=6 * per_frame, chunk=2) as session:
        answers = []

        def ask():
            for _ in range(5):
                answer = session.ask(QUESTION, max_tokens=4)
                answers.append(answer)
                answer.wait()

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        for image in frames(40, model):
            session.watch(image)
        for asker in askers:
            asker.join()
        assert len(answers) == 15
        assert all(answer.finish_reason in ("stop", "length") for answer in answers)
        assert session.stats.frames == 40


def test_conversation_is_remembered_within_its_budget_and_by_id(model):
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(model, append="all", budget=4 * per_frame, text_budget=TextBudget(60, 64, 8)) as session:
        for image in frames(3, model):
            session.watch(image)
        alone = session._memory.conversations.prompt(None, QUESTION)
        for _ in range(4):
            session.ask(QUESTION, conversation="a", max_tokens=4).wait()
        within = session._memory.conversations.prompt("a", QUESTION)
        assert len(alone) < len(within) <= len(alone) + 60
        assert len(session._memory.conversations.turns["a"]) < 4, "the oldest turns went"
        assert session._memory.conversations.prompt("b", QUESTION) == alone


class Held:
    """A decoder whose answers never stop by themselves, and wait before a step until they may go on."""

    def __init__(self, session, at):
        self.step_of, self.stops, self.at, self.steps = session._stream.decoder.step, session.model.bundle.chat.stop_ids, at, 0
        self.reached, self.go_on = threading.Event(), threading.Event()
        session._stream.decoder = self

    def step(self, *of, **how):
        self.steps += 1
        if self.steps == self.at:
            self.reached.set()
            assert self.go_on.wait(120)
        result = self.step_of(*of, **how)
        result.logits[:, list(self.stops)] = -np.inf
        return result


def held_session(model, at):
    session = Session.open(model, append="all", budget=4 * model.bundle.vision.tokens_per_frame)
    for image in frames(2, model):
        session.watch(image)
    session.flush()
    return session, Held(session, at), arena(session._stream)


def test_cancel_ends_an_answer_after_the_token_in_progress(model):
    session, decoder, before = held_session(model, at=3)
    with session:
        answer = session.ask(QUESTION, "one")
        assert decoder.reached.wait(120)
        answer.cancel()
        decoder.go_on.set()
        assert answer.wait(120)
        assert (answer.finish_reason, len(answer.token_ids), decoder.steps) == ("cancelled", 3, 3)
        assert arena(session._stream) == before
        assert not session._memory.conversations.turns, "a cancelled turn is not remembered"
        assert session.ask(QUESTION, max_tokens=5).wait(120)
        assert arena(session._stream) == before


def test_close_cancels_what_is_being_answered_and_what_waits(model):
    session, decoder, before = held_session(model, at=2)
    answers = [session.ask(QUESTION) for _ in range(3)]
    assert decoder.reached.wait(120)
    closing = threading.Thread(target=session.close)
    closing.start()
    assert answers[0]._cancelled.wait(120)
    decoder.go_on.set()
    closing.join(120)
    assert [answer.finish_reason for answer in answers] == ["cancelled"] * 3
    assert len(answers[0].token_ids) == 2
    assert all(answer.finished for answer in answers)
    assert arena(session._stream) == before


def test_full_ends_with_a_clear_error_and_still_answers(model):
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(model, append="all", policy="full", budget=5 * per_frame, chunk=2) as session:
        images = list(frames(6, model))
        for image in images[:5]:
            session.watch(image)
        with pytest.raises(UserError, match=r"cache is full: \d+ tokens hold 5 frames"):
            session.watch(images[5])
        assert session.ask(QUESTION, max_tokens=3).wait(120)


def test_an_error_while_decoding_reaches_the_reader_and_leaves_no_trace(model, monkeypatch):
    with Session.open(model, append="all", budget=4 * model.bundle.vision.tokens_per_frame) as session:
        for image in frames(2, model):
            session.watch(image)
        session.flush()
        before = arena(session._stream)
        session._stream.decoder, real = Broken(), session._stream.decoder
        with pytest.raises(ZeroDivisionError):
            _ = session.ask(QUESTION).text
        with pytest.raises(ZeroDivisionError):
            list(session.ask(QUESTION))
        session._stream.decoder = real
        with monkeypatch.context() as patched:
            patched.setattr(type(session.cache), "commit", Mock(side_effect=MemoryError("std::bad_alloc")))
            with pytest.raises(MemoryError):
                _ = session.ask(QUESTION).text
        assert arena(session._stream) == before
        assert session.ask(QUESTION, max_tokens=3).wait(120)


class Broken:
    def step(self, *_, **others):
        raise ZeroDivisionError


def test_the_cache_allocates_nothing_after_start(model):
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(model, append="all", budget=6 * per_frame, chunk=3) as session:
        cache = session._stream.cache
        counted, size = cache.allocations, cache.nbytes
        address = [buffer.key_address for buffer in cache.buffers()]
        for image in frames(60, model):
            session.watch(image)
        session.ask(QUESTION, max_tokens=3).wait()
        assert session.stats.memory.compressions > 5
        assert (cache.allocations, cache.nbytes) == (counted, size)
        assert [buffer.key_address for buffer in cache.buffers()] == address
        assert all(pointer % 64 == 0 for pointer in address)
        assert ctypes.sizeof(ctypes.c_float) * 2 * cache.kv_heads * cache.head_dim * int(cache.capacities.sum()) < size


def test_a_session_is_refused_in_a_forked_process():
    from edgevlm.apps.sources import SourceOptions, open_source

    context = multiprocessing.get_context("fork")
    told, source = context.SimpleQueue(), open_source("demo", None, SourceOptions(realtime=True))

    def child(session, answer):
        calls = {
            "watch": lambda: session.watch(image), "ask": lambda: session.ask(QUESTION), "flush": session.flush,
            "classify": lambda: session.classify([(QUESTION, ["yes", "no"])]), "forget": session.forget,
            "text": lambda: answer.text, "cancel": session.cancel, "open": lambda: Session.open(session.model, append="all"),
            "read": source.read,
        }  # fmt: skip
        for name, call in calls.items():
            try:
                call()
            except UserError:
                told.put(name)
        session.close()
        session.model.close()
        told.put("closed")

    with Session.open("demo", budget=64) as session:
        image, busy, begun = source.read().image, threading.Event(), threading.Event()
        holding = session.model.scheduler.submit(None, lambda: (begun.set(), busy.wait()), urgent=True)
        begun.wait()
        process = context.Process(target=child, args=(session, session.ask(QUESTION)), daemon=True)
        process.start()
        process.join(10)
        ended, names = process.exitcode, []
        process.kill()
        busy.set()
        holding.result()
        while not told.empty():
            names.append(told.get())
        session.watch(image)
    source.close()
    assert ended == 0
    assert names == ["watch", "ask", "flush", "classify", "forget", "text", "cancel", "open", "read", "closed"]

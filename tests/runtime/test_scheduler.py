"""One thread runs all work on a model: questions first, sessions in turn, and an interrupt cuts nothing in two."""

import asyncio
import threading
import time
from contextlib import suppress

import pytest
from memory import arena
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.scheduler import Scheduler
from edgevlm.runtime.session import Session

QUESTION = "what color was the square?"
WAIT_S = 120.0


class Held:
    """A scheduler whose thread waits in a first task until :meth:`go`; what ran since then is in ``order``."""

    def __init__(self):
        self.scheduler, self.order, self._go = Scheduler(), [], threading.Event()
        begun = threading.Event()
        self.first = self.scheduler.submit("first", lambda: (begun.set(), self._go.wait(WAIT_S)))
        assert begun.wait(WAIT_S)

    def submit(self, session, name, **options):
        return self.scheduler.submit(session, self.order.append, name, **options)

    def go(self):
        self._go.set()
        self.scheduler.run("last", lambda: None)
        self.scheduler.close()
        return self.order


def test_urgent_tasks_go_first_in_the_order_submitted_and_sessions_take_turns():
    held = Held()
    for session in ("a", "b"):
        for number in (1, 2, 3):
            held.submit(session, f"{session}{number}")
    held.submit("c", "c1")
    held.submit("b", "question 1", urgent=True)
    held.submit("a", "question 2", urgent=True)
    held.submit("b", "question 3", urgent=True)
    assert held.scheduler.waiting == 10
    assert held.go() == ["question 1", "c1", "question 2", "a1", "question 3", "b1", "a2", "b2", "a3", "b3"]


def test_tasks_run_by_deadline_so_that_overload_thins_every_rate_alike():
    held = Held()
    periods = {"a": 0.25, "b": 1.0, "c": 1.0}
    for session, period in periods.items():
        for _ in range(round(8 / period)):
            held.submit(session, session, period=period)
    order = held.go()
    for done in range(6, len(order) + 1, 6):
        assert abs(order[:done].count("a") - done * 4 / 6) <= 1
        assert abs(order[:done].count("b") - order[:done].count("c")) <= 1


def test_a_session_that_floods_or_was_idle_takes_nothing_from_the_others():
    held = Held()
    for number in range(1000):
        held.submit("flood", f"flood {number}")
    for number in range(4):
        held.submit("a", f"a {number}")
    held.submit("late", "late")
    order = held.go()
    assert sorted(order[:3]) == ["a 0", "flood 0", "late"]
    assert [order.index(f"a {number}") for number in (1, 2, 3)] == [4, 6, 8]


def test_watches_go_behind_questions_and_before_frames():
    held = Held()
    held.submit("a", "a1")
    held.submit("a", "watch", watch=True)
    held.submit("a", "question", urgent=True)
    held.submit("b", "question 2", urgent=True)
    assert held.scheduler.urgent_waiting
    assert held.scheduler.waiting == 4
    assert held.go() == ["question", "watch", "question 2", "a1"]


def test_watches_take_their_share_of_the_time_and_no_more():
    held, slept = Held(), 0.05
    ran: list[tuple[str, float]] = []

    def watch():
        ran.append(("begin", time.monotonic()))
        time.sleep(slept)
        ran.append(("end", time.monotonic()))

    watches = [held.scheduler.submit(name, watch, watch=True) for name in "ab"]
    held.scheduler.submit("a", lambda: ran.append(("frame", time.monotonic())))
    held._go.set()
    watches[1].result(WAIT_S)
    held.scheduler.close()
    assert [what for what, _ in ran] == ["begin", "end", "frame", "begin", "end"], "a frame waits for no watch's share"
    (_, began), (_, ended), _, (_, again), _ = ran
    assert again - ended >= 5.6 * (ended - began)


def test_a_session_due_next_is_waited_for_while_its_thread_comes_back(monkeypatch):
    """Two cameras of unequal rates that each wait for their frame before they bring the next, and are back in time."""
    monkeypatch.setattr("edgevlm.runtime.scheduler.RETURN_S", WAIT_S)
    scheduler, order, together = Scheduler(), [], threading.Barrier(3)

    def frame(name):
        order.append(name)
        late = time.monotonic() + 5
        while not scheduler.waiting and len(order) < 15 and time.monotonic() < late:
            time.sleep(0.001)

    def camera(name, period, frames):
        together.wait()
        with suppress(UserError):  # closed before it had its turn
            for _ in range(frames):
                scheduler.run(name, frame, name, period=period)

    begun, go = threading.Event(), threading.Event()
    scheduler.submit("first", lambda: (begun.set(), go.wait(WAIT_S)))
    assert begun.wait(WAIT_S)
    threads = [threading.Thread(target=camera, args=of) for of in (("a", 0.25, 16), ("b", 1.0, 5))]
    for thread in threads:
        thread.start()
    together.wait()
    while scheduler.waiting < 2:
        time.sleep(0.001)
    go.set()
    threads[0].join(WAIT_S)
    assert abs(order[:15].count("b") - 3) <= 1
    scheduler.close()
    for thread in threads:
        thread.join(WAIT_S)


def test_an_error_reaches_the_caller_and_the_next_task_runs():
    scheduler = Scheduler()
    with pytest.raises(ZeroDivisionError):
        scheduler.run("a", lambda: 1 // 0)
    assert scheduler.run("a", lambda: threading.current_thread().name) == "edgevlm-model"
    with pytest.raises(RuntimeError, match="the model's own thread cannot wait"):
        scheduler.run("a", scheduler.run, "a", print)
    scheduler.close()
    for submit in (scheduler.submit, scheduler.run):
        with pytest.raises(UserError, match="the model is closed"):
            submit("a", print)


def test_closing_cancels_what_waits_and_ends_the_one_at_work():
    held = Held()
    waiting = held.submit("a", "never")
    waiting.add_done_callback(lambda _: held._go.set())
    held.scheduler.close()
    assert waiting.cancelled()
    assert held.first.done()
    assert held.order == []


def test_a_thread_that_cannot_start_is_one_line_and_tried_again(monkeypatch):
    scheduler = Scheduler()
    with monkeypatch.context() as patched:

        def refuse(_):
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(UserError, match="no more threads can be started"):
            scheduler.submit("a", print)
    assert scheduler.waiting == 0
    assert scheduler.run("a", lambda: 3) == 3
    scheduler.close()


def opened(model, **settings):
    settings = {"budget": 6 * model.bundle.vision.tokens_per_frame, "chunk": 2, "text_budget": TextBudget(16, 64, 8)} | settings
    return Session.open(model, **settings)


def test_sessions_of_one_model_do_not_disturb_each_other(model):
    """Three cameras and their questions at once give what each gives alone."""

    def watched(seed, together):
        with opened(model, policy="h2o") as session:
            together.wait()
            answers = []
            for number, image in enumerate(frames(20, model, seed=seed)):
                session.watch(image)
                if number % 6 == 5:
                    answers.append(session.ask(QUESTION, max_tokens=4))
            texts = [answer.token_ids for answer in answers if answer.wait(WAIT_S)]
            return arena(session._stream), texts

    alone = [watched(seed, threading.Barrier(1)) for seed in range(3)]
    found, together = {}, threading.Barrier(3)

    def camera(seed):
        found[seed] = watched(seed, together)

    threads = [threading.Thread(target=camera, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [found[seed] for seed in range(3)] == alone


def test_all_of_a_model_is_touched_by_its_thread_alone(model, monkeypatch, tmp_path):
    used = set()

    def noted(of, name):
        call = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *a, **k: (used.add(threading.current_thread().name), call(*a, **k))[1])

    noted(model.engine, "encode")
    noted(model.engine, "embed")
    with opened(model, policy="h2o", state=tmp_path) as session:
        stream = session._stream
        for name in ("append_frames", "append_question", "append_text", "state", "store_use", "close"):
            noted(stream, name)
        noted(stream.decoder, "step")
        noted(stream.policy, "before_append")
        for image in frames(9, model):
            session.watch(image)
            _ = session.stats
        session.ask(QUESTION, max_tokens=3).wait(WAIT_S)
        session.flush()
    assert used == {"edgevlm-model"}


def test_an_interrupt_while_a_frame_is_taken_in_cuts_nothing_in_two(model, monkeypatch):
    """The caller stops waiting; the frame is taken in whole, or not at all."""
    images = list(frames(4, model))
    with opened(model) as expected:
        for image in images:
            expected.watch(image)
        memory = arena(expected._stream)
    with opened(model) as session:
        session.watch(images[0])
        append, inside, go = session._stream.append_frames, threading.Event(), threading.Event()

        def slowly(*of):
            inside.set()
            assert go.wait(WAIT_S)
            return append(*of)

        monkeypatch.setattr(session._stream, "append_frames", slowly)
        interrupt_when(inside.is_set, lambda: session.watch(images[1]))
        held = model.scheduler.submit("other", lambda: None)
        interrupt_when(lambda: model.scheduler.waiting == 2, lambda: session.watch(images[2]))
        go.set()
        held.result(WAIT_S)
        assert session.stats.frames == 2, "the second was taken in after all, and the third taken back"
        for image in images[2:]:
            session.watch(image)
        assert arena(session._stream) == memory


def interrupt_when(true, call):
    """Raise KeyboardInterrupt in this thread while it waits in ``call``."""
    import signal

    def interrupt():
        while not true():
            time.sleep(0.005)
        time.sleep(0.1)
        signal.pthread_kill(main.ident, signal.SIGINT)

    main = threading.main_thread()
    assert threading.current_thread() is main
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        call()


def test_an_answer_prints_as_its_text_and_is_read_as_often_as_wanted(model):
    with opened(model) as session:
        for image in frames(3, model):
            session.watch(image)

        async def read(answer):
            return [piece async for piece in answer]

        async def both():
            answers = session.ask(QUESTION), session.ask(QUESTION)
            return answers, await asyncio.gather(*map(read, answers))

        answers, pieces = asyncio.run(both())
        assert "".join(pieces[0]) == "".join(pieces[1]) == str(answers[0]) == "".join(answers[1]) == answers[1].text
        assert list(answers[0]) == list(answers[0]) == pieces[0]
        session._stream.decoder = None
        broken = session.ask(QUESTION)
        with pytest.raises(AttributeError):
            asyncio.run(read(broken))
        with pytest.raises(AttributeError):
            str(broken)

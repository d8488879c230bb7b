"""What a window of time, evidence and the journal cost, in turn with questions and frames without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from edgevlm.apps.journal import Journal, Line
from edgevlm.bench.models import budget_of, filling, has_noise, open_model
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.calib.demo.questions import all_questions
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.progress import Notify
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

ASKED = 10  # questions a round, about evidence, of a model that ends its answers
LONGEST = 32  # tokens of the answer of one that does not
FRACTIONS = (1.0, 0.5, 0.1)  # of the stream's time, up to now
QUESTION = next(text for text in all_questions() if "<" not in text)


def windows(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = ("last-seen", "infinipot-v"),
    budget: int | None = None,
    rounds: int = 15,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model (``demo``, SEEDED or a bundle's directory), policy and fraction of the time that is asked about.

    ``ratio``: its time to the first token over that without a window, in turn. ``rows``: of the memory that it sees, the mean
    of layers and heads. Under a policy whose heads keep other rows the per-layer graphs answer.
    """
    for name in model:
        count = threads or default_threads()
        with open_model(name, count, progress) as loaded:
            for text in policy:
                progress(f"{name}, {text}")
                context = {"bench": "windows", "model": name, "policy": text}
                yield from (context | line for line in measure(loaded, text, budget_of(name, budget), rounds, count))


def evidence(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = ("last-seen", "infinipot-v"),
    budget: int | None = None,
    rounds: int = 15,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model and policy. ``ratio``: time of an answer whose evidence is read over that of one without.

    Without: the attention's rows are not copied either. The answers of a model of random weights are LONGEST tokens.
    """
    for name in model:
        count = threads or default_threads()
        with open_model(name, count, progress) as loaded:
            for text in policy:
                progress(f"{name}, {text}")
                with filled(loaded, text, budget_of(name, budget)) as session:
                    asking = (1, LONGEST) if has_noise(loaded) else (ASKED, None)
                    ways = {True: _ask_often, False: _ask_blind}
                    jobs = {seen: Job(partial(way, session, *asking), asking[0]) for seen, way in ways.items()}
                    took = take_turns(jobs, rounds, partial(_report, progress, f"{name}, {text}"))
                    line = {"bench": "evidence", "model": name, "policy": text, "held": session.stats.tokens}
                    yield {**line, **figures("question", took[True]), **ratio(took[True], took[False]), "threads": count}


def journal(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = ("last-seen",),
    budget: int | None = None,
    frames: int = 64,
    rounds: int = 15,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model and policy. ``ratio``: time of ``frames`` frames and a line of the journal over that of the frames.

    A line is an answer, its evidence, and what SQLite does to keep it: ``line_ms``. ``held``: tokens a layer.
    """
    for name in model:
        count = threads or default_threads()
        with open_model(name, count, progress) as loaded, TemporaryDirectory() as folder:
            notes = Journal(Path(folder))
            for text in policy:
                with filled(loaded, text, budget_of(name, budget)) as session:
                    write = partial(_write, session, notes, LONGEST if has_noise(loaded) else None)
                    watch = partial(_watch, session, World(1), frames)
                    jobs = {"both": Job(partial(watch, write), frames), "frames": Job(watch, frames), "line": Job(write)}
                    took = take_turns(jobs, rounds, partial(_report, progress, f"{name}, {text}"))
                    line = {"bench": "journal", "model": name, "policy": text, "held": session.stats.tokens, "frames": frames}
                    line["line_ms"] = round(median(once.wall for once in took["line"]), 3)
                    yield {**line, **figures("frame", took["both"]), **ratio(took["both"], took["frames"]), "threads": count}
            notes.close()


def _watch(session: Session, world: World, frames: int, then: Callable[[], object] = lambda: None) -> None:
    for _ in range(frames):
        session.watch(world.step())
    session.flush()
    then()


def _write(session: Session, notes: Journal, max_tokens: int | None) -> None:
    answer = session.ask(QUESTION, max_tokens=max_tokens)
    answer.wait()
    moments = answer.evidence.moments if answer.evidence else ()
    notes.add(Line("bench", time.time(), f"{QUESTION} {answer.text}", [asdict(moment) for moment in moments]))


def _report(progress: Notify, context: str, what: str) -> None:
    progress(f"{context}: {what}")


def _ask_often(session: Session, questions: int, max_tokens: int | None) -> None:
    for _ in range(questions):
        answer = session.ask(QUESTION, max_tokens=max_tokens)
        answer.wait()
        _ = answer.evidence


def _ask_blind(session: Session, questions: int, max_tokens: int | None) -> None:
    with patch.object(session._stream, "_look", return_value=None):
        _ask_often(session, questions, max_tokens)


@contextmanager
def filled(model: Model, policy: str, budget: int | None) -> Iterator[Session]:
    """A session whose memory was filled twice over."""
    world = World(0)
    with Session.open(model, policy=policy, budget=budget, append=ALL) as session:
        with filling(model):
            while session.stats.memory.compressions < 2:
                session.watch(world.step(), float(session.stats.frames))
        session.flush()
        yield session


def measure(model: Model, policy: str, budget: int | None, rounds: int, threads: int) -> Iterator[dict[str, Any]]:
    """Fill the memory, then ask about fractions of its time."""
    with filled(model, policy, budget) as session:
        now = session.time_s
        jobs: dict[float | None, Job] = {
            fraction: Job(partial(_ask, session, None if fraction is None else now * (1 - fraction)))
            for fraction in (None, *FRACTIONS)
        }
        took = take_turns(jobs, rounds)
        cache = session.cache
        for fraction in FRACTIONS:
            since = now * (1 - fraction)
            seen = [((cache.kind(layer) == Kind.VISION) & (cache.confirmed(layer) >= since)).sum(1).mean()
                    for layer in range(cache.layers)]  # fmt: skip
            line = {"fraction": fraction, "rows": round(sum(seen) / len(seen)), "held": session.stats.tokens}
            yield {**line, **figures("question", took[fraction]), **ratio(took[fraction], took[None]), "threads": threads}


def _ask(session: Session, since: float | None) -> None:
    session.ask(QUESTION, max_tokens=1, since=since).wait()

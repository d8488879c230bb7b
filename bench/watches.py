"""``edgevlm bench watch``: how well watches open and close on the demo world, and what a dozen of them cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.apps.watches.watch import Watch, WatchState
from edgevlm.calib.accuracy.cases import seed_words
from edgevlm.calib.demo.world import COLORS, SHAPES, World
from edgevlm.calib.intervals import fraction_right
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

Line = dict[str, Any]
Questions = Sequence[tuple[str, Sequence[str]]]
STREAM, WATCHES = 5_000_000, 12  # number of the first stream; watches of each
WINDOW, STILL = "sliding-window", "still"
FPS = 2.0
LATE = 4  # frames that an opening or a closing may come late and count
RULES: dict[str, dict[str, float]] = {
    "default": {},
    "one answer": {"open_after": 0.0, "close_after": 0.0},
    "one answer, .5": {"open_after": 0.0, "close_after": 0.0, "open_above": 0.5, "close_below": 0.5},
    "above .9, below .1": {"open_above": 0.9, "close_below": 0.1},
}


@dataclass
class Score:
    """Of openings and closings: right, spurious and missed; frames from the truth to each right one; further ones of the same
    truth."""

    right: int = 0
    spurious: int = 0
    missed: int = 0
    again: int = 0
    delays: list[int] = field(default_factory=list)

    def add(self, truth: Sequence[bool], opened: Sequence[bool]) -> None:
        """One watch on one stream: whether it should be open, and is, at each frame. It is closed before the first."""
        for state in (True, False):
            found = [frame for frame, (before, now) in enumerate(pairwise([False, *opened])) if before != now == state]
            for start, end in spans([true == state for true in truth]):
                if not state and start == 0:
                    continue  # it is closed already
                mine = [frame for frame in found if start <= frame < end + LATE]
                found = [frame for frame in found if frame not in mine]
                if mine:
                    self.right += 1
                    self.again += len(mine) - 1
                    self.delays.append(mine[0] - start)
                else:
                    self.missed += 1
            self.spurious += len(found)


def summed(scores: Sequence[Score]) -> Line:
    """Of all streams, each with its score: fractions with 95 % intervals clustered by stream."""
    line: Line = {}
    wrong = {"precision": [score.spurious + score.again for score in scores], "recall": [score.missed for score in scores]}
    for name, of in wrong.items():
        clusters = [[True] * score.right + [False] * count for score, count in zip(scores, of, strict=True)]
        if any(clusters):
            found = fraction_right(clusters)
            line |= {f"event_{name}": found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    delays = [delay for score in scores for delay in score.delays]
    return {
        "events": sum(score.right + score.missed for score in scores), **line,
        "delay_frames": float(np.median(delays)) if delays else None, "flaps": sum(score.again for score in scores),
    }  # fmt: skip


def spans(truth: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Frames at which it becomes true, and at which it is no longer."""
    start = None
    for frame, true in enumerate([*truth, False]):
        if true and start is None:
            start = frame
        elif not true and start is not None:
            yield start, frame
            start = None


def quality(
    events: int = 500,
    frames: int = 128,
    seed: str = "0",
    policy: Sequence[str] = ("auto", WINDOW, STILL),
    append: Sequence[str] = ("auto", "all"),
    watches: int = WATCHES,
    threads: int | None = None,
    progress: Notify = lambda words: None,
) -> Iterator[Line]:
    """A line for each memory and rule, over as many streams as it takes for ``events`` comings and goings of objects.

    At each frame ``watches`` watches ask whether an object is there. ``still`` is no policy but the newest frame, as if each
    were asked about by itself. Raises UserError.
    """
    try:
        words = seed_words(seed)
    except ValueError:
        raise UserError(f"--seed {seed}: give a number from 0 up, or test for the seeds kept for reports") from None
    scores: dict[tuple[str, str, str], list[Score]] = {}
    with closing(Model.load("demo", threads=threads)) as model:
        memories: dict[tuple[str, str], dict[str, Any]] = {
            (name, way): {"policy": name, "append": way}
            for name in policy
            for way in (["all"] if name in (WINDOW, STILL) else append)
        }
        if (STILL, "all") in memories:
            per_frame = model.bundle.vision.tokens_per_frame
            memories[STILL, "all"] = {"policy": WINDOW, "append": "all", "budget": per_frame, "chunk": 1}
        happened = stream = 0
        while happened < events:
            progress(f"stream {stream + 1}, {happened} of {events} events")
            own = [*words, STREAM + stream]
            pictures, present = shown(own, frames)
            watched, truth = chosen(present, watches, np.random.default_rng(own))
            for memory, options in memories.items():
                now = asked(model, pictures, watched, options)
                for rule, settings in RULES.items():
                    score = Score()
                    for truths, probabilities in zip(truth.T.tolist(), now.T, strict=True):
                        score.add(truths, opened(probabilities, settings))
                    scores.setdefault((*memory, rule), []).append(score)
            happened += sum(len(before ^ now) for before, now in pairwise([set(), *present]))
            stream += 1
    for (name, way, rule), each in scores.items():
        yield {"bench": "watch", "policy": name, "append": way, "about": "now", "rule": rule, "streams": stream, **summed(each)}


def shown(seed: list[int], frames: int) -> tuple[list[NDArray[np.uint8]], list[set[str]]]:
    """A world's pictures, and the names of what each shows."""
    world, pictures, present = World(seed), [], []
    for _ in range(frames):
        pictures.append(world.step())
        present.append({thing.name for thing in world.history.present})
    return pictures, present


def chosen(present: list[set[str]], watches: int, random: np.random.Generator) -> tuple[list[str], NDArray[np.bool_]]:
    """So many objects to watch for, and whether each is there ``[frames, watches]``: all that come, then others."""
    come = sorted(set().union(*present))
    others = [f"{color} {shape}" for color in COLORS for shape in SHAPES if f"{color} {shape}" not in come]
    names = [*random.permutation(come)[:watches], *random.permutation(others)][:watches]
    return names, np.array([[name in there for name in names] for there in present], bool).reshape(len(present), len(names))


def asked(model: Model, pictures: list[NDArray[np.uint8]], names: list[str], options: dict[str, Any]) -> NDArray[np.float64]:
    """The probability of yes, ``[frames, names]``: is it there now?"""
    articles = ["an" if name.startswith("orange") else "a" for name in names]
    questions = [(f"is there {a} {name} now?", ("yes", "no")) for a, name in zip(articles, names, strict=True)]
    now = np.zeros((len(pictures), len(names)))
    with Session.open(model, **options) as session:
        for frame, picture in enumerate(pictures if names else ()):
            session.watch(picture, (frame + 1) / FPS)
            now[frame] = [one.probabilities["yes"] for one in session.classify(questions)]
    return now


def opened(probabilities: NDArray[np.float64], settings: dict[str, float]) -> list[bool]:
    """Whether a watch is open at each frame."""
    state, is_open = WatchState(Watch.model_validate({"question": "is it there?", **settings})), []
    for frame, probability in enumerate(probabilities.tolist()):
        state.observe((frame + 1) / FPS, probability)
        is_open.append(state.is_open)
    return is_open


def cost(
    model: str = "demo", rounds: int = 5, frames: int = 200, watches: int = WATCHES, threads: int | None = None
) -> Iterator[Line]:
    """Frames a second of a camera that is watched as fast as it goes, with and without watches, in turn; and together or one
    by one."""
    loaded = Model.load(model, threads=threads)
    names = [f"{color} {shape}" for shape in SHAPES for color in COLORS][:watches]
    questions = [(f"is there a {name} now?", ("yes", "no")) for name in names]
    alone, beside, together, singly = [], [], [], []
    for _ in range(rounds):
        with Session.open(loaded) as session:
            alone.append(rate(session, frames, ()))
            together.append(classified_ms(session, [questions]))
            singly.append(classified_ms(session, [[question] for question in questions]))
        with Session.open(loaded) as session:
            beside.append(rate(session, frames, questions))
    loaded.close()
    ratio = np.array(beside) / np.array(alone)
    yield {
        "bench": "watch-cost", "model": model, "watches": watches, "fps": float(np.median(beside)),
        "fps_alone": float(np.median(alone)), "fps_ratio": float(np.median(ratio)), "low": float(ratio.min()),
        "high": float(ratio.max()), "ms_together": float(np.median(together)), "ms_singly": float(np.median(singly)),
    }  # fmt: skip


def rate(session: Session, frames: int, questions: Questions) -> float:
    """Frames a second, while a thread of its own asks the questions again and again."""
    ending = threading.Event()

    def ask() -> None:
        while not ending.is_set():
            session.classify(questions, watch=True)

    source = open_source("demo", None, SourceOptions())
    pictures = [frame.image for frame in islice(source, frames)]
    session.watch(pictures[0])
    asking = threading.Thread(target=ask)
    if questions:
        asking.start()
    began = time.perf_counter()
    for picture in pictures[1:]:
        session.watch(picture)
    took = time.perf_counter() - began
    ending.set()
    if questions:
        asking.join()
    return (frames - 1) / took


def classified_ms(session: Session, groups: Sequence[Questions]) -> float:
    """Milliseconds for all questions, asked in these groups."""
    began = time.perf_counter()
    for questions in groups:
        session.classify(questions)
    return 1e3 * (time.perf_counter() - began)

"""Measure how accurately watches open and close, and how much a dozen watches cost (``edgevlm bench watch``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.watches.watch import Watch, WatchState
from edgevlm.bench.timing import timed, watching
from edgevlm.calib.accuracy.cases import seed_words
from edgevlm.calib.demo.world import World
from edgevlm.calib.intervals import fraction_right
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.taught import COLORS, SHAPES

Line = dict[str, Any]
Questions = Sequence[tuple[str, Sequence[str]]]
STREAM, WATCHES, FRAMES = 5_000_000, 12, 128  # the first stream's number; watches per stream; frames per stream
COST_FRAMES = 200
WINDOW, STILL = "sliding-window", "still"
FPS = 2.0
LATE = 4  # an opening or closing that is this many frames late still counts as right
RULES: dict[str, dict[str, float]] = {
    "default": {},
    "one answer": {"open_after": 0.0, "close_after": 0.0},
    "one answer, .5": {"open_after": 0.0, "close_after": 0.0, "open_above": 0.5, "close_below": 0.5},
    "above .9, below .1": {"open_above": 0.9, "close_below": 0.1},
}


@dataclass
class Score:
    """How many openings and closings of watches were right, spurious, missed or repeated (``again``)."""

    right: int = 0
    spurious: int = 0
    missed: int = 0
    again: int = 0
    delays: list[int] = field(default_factory=list)  # frames by which right openings and closings were late

    def add(self, truth: Sequence[bool], opened: Sequence[bool]) -> None:
        """Count a watch's right and wrong openings and closings. ``truth``: whether the watch should be open at each frame."""
        for state in (True, False):
            found = [frame for frame, (before, now) in enumerate(pairwise([False, *opened])) if before != now == state]
            for start, end in spans([true == state for true in truth]):
                if not state and start == 0:
                    continue  # the watch starts closed
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
    """Return precision and recall, with 95 % confidence intervals clustered by stream, and the median delay."""
    line: Line = {"events": sum(score.right + score.missed for score in scores)}
    wrong = {"precision": [score.spurious + score.again for score in scores], "recall": [score.missed for score in scores]}
    for name, of in wrong.items():
        clusters = [[True] * score.right + [False] * count for score, count in zip(scores, of, strict=True)]
        if any(clusters):
            found = fraction_right(clusters)
            line |= {f"event_{name}": found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    delays = [delay for score in scores for delay in score.delays]
    median = float(np.median(delays)) if delays else None
    return line | {"delay_frames": median, "flaps": sum(score.again for score in scores)}


def spans(truth: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the first index of each series of true values, and the first index after that series."""
    edges = [frame for frame, (before, now) in enumerate(pairwise([False, *truth, False])) if before != now]
    yield from zip(edges[::2], edges[1::2], strict=True)


def quality(
    events: int = 500,
    seed: str = "0",
    policy: Sequence[str] = ("auto", WINDOW, STILL),
    append: Sequence[str] = ("auto", "all"),
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[Line]:
    """Yield a line for each policy and each rule for opening a watch.

    At every frame of a stream, each of the WATCHES watches asks whether its object is present. Streams are added until the
    watched objects have appeared or disappeared ``events`` times. The policy ``still`` remembers only the current frame.
    Raises UserError.
    """
    words = seed_words(seed)
    scores: dict[tuple[str, str, str], list[Score]] = {}
    memories = [(name, way) for name in policy for way in (["all"] if name in (WINDOW, STILL) else append)]
    with closing(Model.load("demo", engine=engine, threads=threads)) as model:
        happened = stream = 0
        while happened < events:
            show(f"stream {stream + 1}, {happened} of {events} events")
            own = [*words, STREAM + stream]
            pictures, present = shown(own, FRAMES)
            watched, truth = chosen(present, WATCHES, np.random.default_rng(own))
            for name, way in memories:
                options: dict[str, Any] = {"policy": name, "append": way}
                if name == STILL:
                    options |= {"policy": WINDOW, "budget": model.bundle.vision.tokens_per_frame, "chunk": 1}
                now = asked(model, pictures, watched, options)
                for rule, settings in RULES.items():
                    score = Score()
                    for truths, probabilities in zip(truth.T.tolist(), now.T, strict=True):
                        score.add(truths, opened(probabilities, settings))
                    scores.setdefault((name, way, rule), []).append(score)
            happened += sum(len(before ^ now) for before, now in pairwise([set(), *present]))
            stream += 1
    for (name, way, rule), each in scores.items():
        yield {"bench": "watch", "policy": name, "append": way, "about": "now", "rule": rule, "streams": stream, **summed(each)}


def shown(seed: list[int], frames: int) -> tuple[list[NDArray[np.uint8]], list[set[str]]]:
    """Return a world's pictures and the names of the objects in each."""
    world, pictures, present = World(seed), [], []
    for _ in range(frames):
        pictures.append(world.step())
        present.append({thing.name for thing in world.history.present})
    return pictures, present


def chosen(present: list[set[str]], watches: int, random: np.random.Generator) -> tuple[list[str], NDArray[np.bool_]]:
    """Choose objects to watch for. Objects that never appear are chosen only if there are too few others. Return the objects'
    names, and whether each object is present in each frame.

    The presence of the objects is bool ``[frames, watches]``.
    """
    come = sorted(set().union(*present))
    others = [f"{color} {shape}" for color in COLORS for shape in SHAPES if f"{color} {shape}" not in come]
    names = [*random.permutation(come)[:watches], *random.permutation(others)][:watches]
    return names, np.array([[name in there for name in names] for there in present], bool).reshape(len(present), len(names))


def asked(model: Model, pictures: list[NDArray[np.uint8]], names: list[str], options: dict[str, Any]) -> NDArray[np.float64]:
    """Return the model's probability that each object is present at each frame. Shape ``[frames, names]``."""
    now = np.zeros((len(pictures), len(names)))
    with Session.open(model, **options) as session:
        for frame, picture in enumerate(pictures if names else ()):
            session.watch(picture, (frame + 1) / FPS)
            now[frame] = [one.probabilities["yes"] for one in session.classify(are_there(names))]
    return now


def are_there(names: Sequence[str]) -> Questions:
    articles = ["an" if name.startswith("orange") else "a" for name in names]
    return [(f"is there {article} {name} now?", ("yes", "no")) for article, name in zip(articles, names, strict=True)]


def opened(probabilities: NDArray[np.float64], settings: dict[str, float]) -> list[bool]:
    state, is_open = WatchState(Watch.model_validate({"question": "is it there?", **settings})), []
    for frame, probability in enumerate(probabilities.tolist()):
        state.observe((frame + 1) / FPS, probability)
        is_open.append(state.is_open)
    return is_open


def cost(model: str = "demo", rounds: int = 5, engine: str = DEFAULT_ENGINE, threads: int | None = None) -> Iterator[Line]:
    """Yield one line with the frames per second, with and without watches, and the ms per question.

    The questions are timed twice: all in one call, and one by one.
    """
    questions = are_there([f"{color} {shape}" for shape in SHAPES for color in COLORS][:WATCHES])
    pictures, _ = shown([0], COST_FRAMES)
    took: list[tuple[float, ...]] = []
    with closing(Model.load(model, engine=engine, threads=threads)) as loaded:
        for _ in range(rounds):
            with Session.open(loaded) as session:
                alone = rate(session, pictures, ())
                together = timed(lambda: session.classify(questions))
                singly = timed(lambda: [session.classify([question]) for question in questions])
            with Session.open(loaded) as session:
                took.append((rate(session, pictures, questions), alone, together, singly))
    beside, alone, together, singly = (float(each) for each in np.median(took, axis=0))
    ratio = [one / other for one, other, *_ in took]
    yield {
        "bench": "watch-cost", "model": model, "watches": WATCHES, "fps": beside, "fps_alone": alone,
        "fps_ratio": float(np.median(ratio)), "low": min(ratio), "high": max(ratio), "ms_together": together,
        "ms_singly": singly,
    }  # fmt: skip


def rate(session: Session, pictures: Sequence[NDArray[np.uint8]], questions: Questions) -> float:
    """Return the frames watched per second while a separate thread repeats the questions."""
    ending = threading.Event()

    def ask() -> None:
        while questions and not ending.is_set():
            session.classify(questions, watch=True)

    session.watch(pictures[0])
    asking = threading.Thread(target=ask)
    asking.start()
    ms = timed(watching(session, pictures[1:]).run)
    ending.set()
    asking.join()
    return 1e3 * (len(pictures) - 1) / ms

"""``edgevlm bench watch``: how well watches open and close on the demo world, and what a dozen of them cost a camera."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.apps.watches.watch import Watch, WatchState
from edgevlm.calib.accuracy.cases import seed_words
from edgevlm.calib.demo.world import COLORS, SHAPES, World
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

Line = dict[str, Any]
Questions = Sequence[tuple[str, Sequence[str]]]
STREAM, WATCHES = 5_000_000, 12  # number of the first stream; watches of each
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
    """Of openings: right, spurious and missed; frames from the truth to each right one; further ones of the same truth."""

    right: int = 0
    spurious: int = 0
    missed: int = 0
    again: int = 0
    delays: list[int] = field(default_factory=list)

    def line(self) -> Line:
        opened = self.right + self.spurious + self.again
        return {
            "events": self.right + self.missed, "event_precision": self.right / max(1, opened),
            "event_recall": self.right / max(1, self.right + self.missed),
            "delay_frames": float(np.median(self.delays)) if self.delays else None, "flaps": self.again,
        }  # fmt: skip

    def add(self, truth: Sequence[bool], opened: Sequence[bool]) -> None:
        """One watch on one stream: whether it should be open, and is, at each frame."""
        found = [frame for frame in range(len(opened)) if opened[frame] and not (frame and opened[frame - 1])]
        for start, end in spans(truth):
            mine = [frame for frame in found if start <= frame < end + LATE]
            found = [frame for frame in found if frame not in mine]
            if mine:
                self.right += 1
                self.again += len(mine) - 1
                self.delays.append(mine[0] - start)
            else:
                self.missed += 1
        self.spurious += len(found)


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
    policy: Sequence[str] = ("auto",),
    append: Sequence[str] = ("auto", "all"),
    threads: int | None = None,
    progress: Progress = lambda words: None,
) -> Iterator[Line]:
    """A line for each memory and rule: events are objects that come in, each asked about by a watch at each frame.

    A watch asks "is there a red square now?". Beside memories by ``policy`` and ``append``: a sliding window of the same
    budget, and the newest frame alone, as if each were asked about by itself.
    """
    model = Model.load("demo", threads=threads)
    per_frame = model.bundle.vision.tokens_per_frame
    memories: dict[tuple[str, str], dict[str, Any]] = {
        (name, one): {"policy": name, "append": one} for name in policy for one in append
    }
    memories["sliding-window", "all"] = {"policy": "sliding-window", "append": "all"}
    memories["still", "all"] = {"policy": "sliding-window", "append": "all", "budget": per_frame, "chunk": 1}
    scores = {(memory, rule): Score() for memory in memories for rule in RULES}
    words = seed_words(seed)
    done = stream = 0
    while done < events:
        pictures, present = shown([*words, STREAM + stream], frames)
        watched, truth = chosen(present, np.random.default_rng([*words, STREAM + stream]))
        for memory, options in memories.items():
            progress(f"{done} of {events} events; {' '.join(memory)}")
            probabilities = asked(model, pictures, watched, options)
            for rule, settings in RULES.items():
                for each in range(len(watched)):
                    scores[memory, rule].add(truth[:, each].tolist(), opened(probabilities[:, each], settings))
        done += sum(len(list(spans(truth[:, each].tolist()))) for each in range(len(watched)))
        stream += 1
    model.close()
    for (memory, rule), score in scores.items():
        yield {"bench": "watch", "policy": memory[0], "append": memory[1], "rule": rule, "streams": stream, **score.line()}


def shown(seed: list[int], frames: int) -> tuple[list[NDArray[np.uint8]], list[set[str]]]:
    """A world's pictures, and the names of what each shows."""
    world, pictures, present = World(seed), [], []
    for _ in range(frames):
        pictures.append(world.step())
        present.append({thing.name for thing in world.history.present})
    return pictures, present


def chosen(present: list[set[str]], random: np.random.Generator) -> tuple[list[str], NDArray[np.bool_]]:
    """Objects to watch for, WATCHES of them, and whether each is there ``[frames, watches]``: all that come, then others."""
    come = sorted(set().union(*present))
    others = [f"{color} {shape}" for color in COLORS for shape in SHAPES if f"{color} {shape}" not in come]
    names = [*random.permutation(come)[:WATCHES], *random.permutation(others)][:WATCHES]
    return names, np.array([[name in there for name in names] for there in present])


def asked(model: Model, pictures: list[NDArray[np.uint8]], names: list[str], options: dict[str, Any]) -> NDArray[np.float64]:
    """The probability of yes, ``[frames, watches]``."""
    questions = [(f"is there {'an' if name.startswith('orange') else 'a'} {name} now?", ("yes", "no")) for name in names]
    with Session.open(model, **options) as session:
        found = np.zeros((len(pictures), len(names)))
        for frame, picture in enumerate(pictures):
            session.watch(picture, (frame + 1) / FPS)
            found[frame] = [one.probabilities["yes"] for one in session.classify(questions)]
    return found


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

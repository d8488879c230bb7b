"""Measure the time from a long question to its answer's first token, and how long frames wait meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from edgevlm.bench.models import open_model
from edgevlm.bench.timing import spread
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.session import Session

LENGTHS = (256, 1000, 4000)  # tokens in a question
NOW = "how many objects are there now?"
IDLE_S = 2.0
BEFORE = 32  # frames in the memory when a question is asked


def questions(
    model: str = "demo",
    budget: str | None = None,
    fps: float = 4.0,
    rounds: int = 5,
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each question length. Two cameras share a model, and the questions are about one of them.

    ``ttft_ms``: the time to the first token. ``own_frame_ms``: the longest wait of a frame from the camera that the question is
    about. ``frame_ms``: the longest wait of a frame from the other camera. ``idle_frame_ms``: the longest wait of a frame while
    no question is asked. ``fps_ratio``: the other camera's frame rate during a question divided by its rate without one.
    Figures are medians over rounds.
    """
    with ExitStack() as stack:
        loaded = stack.enter_context(open_model(model, threads or default_threads(), engine))
        held: dict[str, Any] = {} if budget is None else {"budget": budget}
        sessions = [stack.enter_context(Session.open(loaded, **held)) for _ in range(2)]
        cameras, asked = [stack.enter_context(PacedCamera(session, fps)) for session in sessions], sessions[0]
        while min(len(camera.waits) for camera in cameras) < BEFORE:
            time.sleep(0.05)
        unit = len(asked.chat.suffix([], f"{NOW} {NOW}")) - len(asked.chat.suffix([], NOW))
        for length in LENGTHS:
            text = " ".join([NOW] * (length // unit))
            line = {"bench": "serve-questions", "model": model, "policy": asked.policy}
            try:
                asked.check(text)
            except UserError as error:
                yield {**line, "prompt_tokens": length, "stopped": str(error)}
                continue
            ttft, idle, own, others, rates = (list[float]() for _ in range(5))
            for number in range(rounds):
                show(f"{length} tokens: round {number + 1} of {rounds}")
                since = time.perf_counter()
                time.sleep(IDLE_S)
                idle.append(max(camera.longest(since)[0] for camera in cameras))
                rate = cameras[1].longest(since)[1] / (time.perf_counter() - since)
                since = time.perf_counter()
                answer = asked.ask(text, max_tokens=1)
                answer.wait()
                time.sleep(2 / fps)  # let the session watch the waiting frames
                took, (other, count) = time.perf_counter() - since, cameras[1].longest(since)
                ttft.append(answer.ttft_ms)
                own.append(cameras[0].longest(since)[0])
                others.append(other)
                rates += [count / took / rate] if rate else []
            yield {
                **line, "prompt_tokens": answer.prompt_tokens, **spread(ttft, "ttft_ms", "ttft_low", "ttft_high"),
                **spread(others, "frame_ms", "frame_low", "frame_high"), **spread(own, "own_frame_ms", "own_low", "own_high"),
                **spread(idle, "idle_frame_ms", "idle_low", "idle_high"), **spread(rates, "fps_ratio"),
            }  # fmt: skip


class PacedCamera(threading.Thread):
    """A thread that shows pictures to a session and records how long each picture waited. ``fps``: pictures per second."""

    def __init__(self, session: Session, fps: float) -> None:
        super().__init__(daemon=True)
        self.waits: list[tuple[float, float]] = []
        self._session, self._period, self._ended = session, 1 / fps, threading.Event()
        session.rate = fps

    def __enter__(self) -> PacedCamera:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def longest(self, since: float) -> tuple[float, int]:
        """Return the longest wait, in ms, of the frames since a given time, and the number of these frames."""
        waits = [took for at, took in self.waits if at >= since]
        return 1e3 * max(waits, default=0.0), len(waits)

    def run(self) -> None:
        random, due = np.random.default_rng(0), time.perf_counter()
        height, width = self._session.model.bundle.vision.size
        while not self._ended.wait(max(0.0, due - time.perf_counter())):
            due = max(due + self._period, time.perf_counter())
            picture = random.integers(0, 256, (height, width, 3), np.uint8)
            at = time.perf_counter()
            self._session.watch(picture)
            self.waits.append((at, time.perf_counter() - at))

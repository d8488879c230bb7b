"""Measure what policies cost and what they remember on a stream of a hundred thousand frames.

The policies run one after another, each in a separate process. The stream repeats no frame.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from typing import Any

import numpy as np
import psutil

from edgevlm.bench.accuracy.report import gap_name
from edgevlm.bench.stream.growth import peak_rss
from edgevlm.bench.timing import percentiles
from edgevlm.calib.accuracy.worker import moved_bytes
from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.world import STAYS, LongWorld, Visit
from edgevlm.progress import show
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.helper_process import Helper
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL, parse_append, parse_encode
from edgevlm.runtime.stateful import bytes_of
from edgevlm.runtime.taught import COLORS, SHAPES

TEXT_BUDGET = TextBudget(80, 80, 80)
REPORT_EVERY = 500
LEAST = 200  # marks before this many frames are skipped
GAPS = (30, 60, 90, 130, 200, 350, 600, 900, 1_400, 2_500, 4_000, 7_000, 9_000, 20_000, 40_000, 80_000)
"""Frames between a visitor's leaving and a mark. Each mark has visitors for as many of these gaps as fit."""
SHAPES_OF_VISITORS = 6  # objects that are not visitors have the remaining two shapes
KINDS = ("past_where", "past_seen")


def longrun(
    policy: Sequence[str] = ("rekv", "hybrid", "last-seen", "sliding-window"),
    frames: int = 100_000,
    budget: int | None = None,
    append: Sequence[str] = (ALL,),
    encode: Sequence[str] = (ALL,),
    seed: int = 0,
    host_bytes: int = 256_000_000,
    file_bytes: int = 8_000_000_000,
    engine: str = DEFAULT_ENGINE,
) -> Iterator[dict[str, Any]]:
    """Measure each policy after a hundredth, a tenth and all of the frames.

    Yields a line for each policy and each setting of ``append`` and ``encode``. ``budget``: vision tokens per layer on the
    device, 512 by default. ``host_bytes``, ``file_bytes``: limits of the store's memory and file. ``ttft_ratio``: the time to
    the first token divided by its value at the first measurement. ``right``: the numbers of right answers and of questions, by
    how long ago the answer was shown. Raises UserError for an invalid policy.
    """
    marks = sorted({mark for mark in (frames // 100, frames // 10, frames) if mark >= LEAST})
    for name, way, look in product(policy, append, encode):
        create_policy(name), parse_append(way), parse_encode(look)
    for name, way, look in product(policy, append, encode):
        work = {"policy": name, "budget": budget or 512, "marks": marks, "seed": seed, "append": way, "encode": look}
        first: float | None = None
        with Helper() as helper:
            for line in helper.lines(
                f"{__name__}:measure", **work, host_bytes=host_bytes, file_bytes=file_bytes, engine=engine
            ):
                if "frames_done" in line:
                    show(f"{name}: {line['frames_done']:,} of {marks[-1]:,} frames")
                else:
                    first = first or line["ttft_ms_p50"]
                    yield line | {"ttft_ratio": round(line["ttft_ms_p50"] / first, 3)}


def measure(
    policy: str, budget: int, marks: Sequence[int], seed: int, append: str, encode: str, host_bytes: int, file_bytes: int,
    engine: str = DEFAULT_ENGINE,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the results after each number of frames in ``marks``.

    Between these results, lines ``{"frames_done": n}`` report progress. Raises UserError for an invalid policy or budget.
    """
    made, rng, (world, visits) = create_policy(policy), np.random.default_rng([seed, 2]), plan(seed, marks)
    limits: dict[str, Any] = {"budget": budget, "append": append, "encode": encode}
    if isinstance(made, Retrieval):
        limits |= {"store_bytes": file_bytes, "host_bytes": host_bytes}
    done = 0
    with (
        closing(Model.load("demo", engine=engine, threads=1)) as model,
        Session.open(model, policy=made, text_budget=TEXT_BUDGET, **limits) as session,
    ):
        for mark in marks:
            started, cpu, first = time.perf_counter(), time.process_time(), done
            while done < mark:
                session.watch(world.step())
                done += 1
                if done % REPORT_EVERY == 0:
                    yield {"frames_done": done}
            session.flush()
            seconds, cpu, stats, store = time.perf_counter() - started, time.process_time() - cpu, session.stats, session.store
            line = {
                "bench": "longrun", "policy": policy, "budget": budget, "append": append, "encode": encode,
                "appended": round(stats.memory.appended, 4), "encoded": round(stats.encoded, 4), "seed": seed, "frames": mark,
                "fps": round((done - first) / seconds, 1), "cpu_ms_per_frame": round(1e3 * cpu / (done - first), 3),
                "device_bytes": session.cache.nbytes + bytes_of(made) + stats.present_bytes, "tower_bytes": stats.tower_bytes,
                "host_bytes": store.host_bytes if store else 0, "file_bytes": store.file_bytes if store else 0,
                **_ask(session, questions(world, visits[mark], rng)), "rss_bytes": psutil.Process().memory_info().rss,
                "peak_rss_bytes": peak_rss(), "reindexings": stats.memory.reindexings,
            }  # fmt: skip
            if isinstance(made, Retrieval):
                line |= {"merged": made.merged, "lost": made.store.stats.lost, "truncated_rows": made.working.truncated}
            yield line


def _ask(session: Session, asked: list[tuple[str, str, int | None]]) -> dict[str, Any]:
    """Ask each question once, after a warm-up question whose answer is discarded."""
    session.ask(asked[-1][0]).wait()
    right: dict[str, list[bool]] = defaultdict(list)
    before, ttft_ms = moved_bytes(session), []
    for text, truth, gap in asked:
        answer = session.ask(text)
        said = answer.text.strip()
        ttft_ms.append(answer.ttft_ms)
        right["now" if gap == 0 else "never" if gap is None else str(gap_name(gap))].append(said == truth)
    past = [of for name, each in right.items() if name not in ("now", "never") for of in each]
    return {
        "questions": len(asked), **percentiles(ttft_ms, "ttft_ms", (50, 95)),
        "moved_bytes_per_question": (moved_bytes(session) - before) // len(asked),
        "right": {name: f"{sum(each)}/{len(each)}" for name, each in right.items()}, "backward": round(float(np.mean(past)), 4),
    }  # fmt: skip


def plan(seed: int, marks: Sequence[int]) -> tuple[LongWorld, dict[int, list[Visit]]]:
    """Return the stream, and for each number of frames in ``marks`` the past objects to ask about at that point.

    Some of these objects left recently, and others long ago.
    """
    rng = np.random.default_rng([5_000_000, seed])
    pairs = list(product(range(len(COLORS)), rng.permutation(len(SHAPES))[:SHAPES_OF_VISITORS].tolist()))
    rng.shuffle(pairs)
    asked: dict[int, list[Visit]] = {mark: [] for mark in marks}
    taken: list[Visit] = []
    for mark, gap in product(marks, GAPS):
        stay = int(rng.integers(*STAYS))
        enters, leaves = mark - gap - stay, mark - gap
        free = all(leaves < other.enters or other.leaves < enters for other in taken)
        if enters > 0 and free and pairs:
            asked[mark].append(Visit(enters, leaves, *pairs.pop()))
            taken.append(asked[mark][-1])
    return LongWorld([5_000_000, seed, 1], sorted(taken, key=lambda visit: visit.enters)), asked


def questions(world: LongWorld, visits: Sequence[Visit], rng: np.random.Generator) -> list[tuple[str, str, int | None]]:
    """Return questions about the visits, about objects never shown, and about now.

    Each question comes with its answer and with how many frames ago the answer was shown.
    """
    asked: list[tuple[str, str, int | None]] = []
    for visit, kind in product(visits, KINDS):
        question = demo.ask(kind, int(rng.integers(2)), visit.color, visit.shape)
        answer = demo.truth(question, world.history)
        assert answer is not None, "only one visitor has this colour and shape"
        asked.append((question.text, answer, world.history.now - visit.leaves + 1))
    absent = sorted(set(product(range(len(COLORS)), range(len(SHAPES)))) - world.history.shown)
    for _ in visits if absent else ():
        color, shape = absent[int(rng.integers(len(absent)))]
        asked.append((demo.ask("past_seen", 0, color, shape).text, "no", None))
    now = (demo.draw(kind, world.history, rng) for kind in ("now_count", "now_color", "now_where"))
    return asked + [(question.text, answer, 0) for question, answer in filter(None, now)]

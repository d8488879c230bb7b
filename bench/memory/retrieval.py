"""What a retrieval policy fetches, layer by layer and head by head, and what that costs beside a sliding window.

A stream is watched, then questions are asked about it. The ratios are those of V-Rex's Table II and Fig. 20, the fractions
those of its Fig. 16. The sliding window has the same budget and takes its turn in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.memory.store import forget_pages
from edgevlm.bench.models import check_policies, open_model
from edgevlm.bench.output import prefixed
from edgevlm.calib.demo.questions import all_questions
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.retrieval.stats import PHASES, Phase, RetrievalStats
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

WINDOW = "sliding-window"
QUESTIONS = [text for text in all_questions() if "<" not in text]
ANSWER_TOKENS = 8
REPORT_EVERY = 512  # frames
WAYS = {"fetched": RetrievalStats.ratio, "attended": RetrievalStats.attended, "rule": RetrievalStats.by_rule}
"""``fetched``: of the offloaded rows, the fraction fetched; ``attended``: of window and offloaded rows, the fraction attended
to; ``rule``: of all that the policy chooses from, the fraction its rule chose before it was truncated, if the policy says.
"""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """What is watched and asked; ``chunk``: frames encoded at once; ``cold``: no page of the store's file is in memory."""

    budget: int | None
    frames: int
    questions: int
    chunk: int
    host_bytes: int | None = None
    cold: bool = False

    def open(self, model: Model, policy: str) -> Session:
        retrieves = isinstance(create_policy(policy), Retrieval)
        limit = self.host_bytes if retrieves and self.host_bytes else None
        return Session.open(model, policy=policy, budget=self.budget, chunk=self.chunk, host_bytes=limit, append=ALL)


@dataclass(frozen=True, slots=True)
class WatchCost:
    """Medians of a frame's time and of that to a first token, warm; bytes from the store a question, and from its file."""

    frame_ms: float
    ttft_ms: float
    moved: int
    read: int


def retrieval(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = ("resv",),
    budget: int | None = None,
    frames: Sequence[int] = (1024,),
    questions: int = 6,
    chunk: Sequence[int] = (8,),
    host_bytes: int | None = None,
    cold: bool = False,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model and policy. Raises UserError for a policy that retrieves nothing."""
    check_policies(policy, lambda one: isinstance(one, Retrieval), "retrieves nothing")
    settings = WatchSettings(budget, frames[0], questions, chunk[0], host_bytes, cold)
    for name in model:
        with open_model(name, threads or default_threads(), progress) as loaded:
            with settings.open(loaded, WINDOW) as session:
                plain = watch(session, settings, prefixed(progress, f"{name}, {WINDOW}"))
            for text in policy:
                line = _measure(loaded, text, settings, plain, prefixed(progress, f"{name}, {text}"))
                yield {"bench": "retrieval", "model": name, "policy": text, "threads": threads or default_threads(), **line}


def _measure(model: Model, policy: str, settings: WatchSettings, plain: WatchCost, progress: Notify) -> dict[str, Any]:
    """What one policy fetched and took, and how much more than the sliding window."""
    with settings.open(model, policy) as session:
        took = watch(session, settings, progress)
        policy_of = session._stream.policy
        assert isinstance(policy_of, Retrieval)
        stats = policy_of.stats
        return {
            **asdict(settings), "budget": session.budget,
            "window_rows": policy_of.window_rows, "working_rows": policy_of.working_rows,
            "index_bytes": policy_of.index_bytes, "offloaded_rows": int(policy_of.offloaded.max()),
            **{f"{phase}_ratio": _mean(stats.ratio(phase)) for phase in PHASES},
            **{f"{phase}_{way}": _mean(of(stats, phase)) for way, of in WAYS.items() if way != "fetched" for phase in PHASES},
            "heads": {way: {phase: _rounded(of(stats, phase)) for phase in PHASES} for way, of in WAYS.items()},
            "breakdown": {phase: {name: round(part, 4) for name, part in stats.breakdown(phase).items()} for phase in PHASES},
            "call_ms": {phase: _per_call(stats, phase) for phase in PHASES},
            "offload_ms_per_frame": round(stats.offload_ms / settings.frames, 4),
            "bytes_per_question": took.moved, "disk_bytes_per_question": took.read,
            "frame_ms": round(took.frame_ms, 3), "frame_over_window": round(took.frame_ms / plain.frame_ms, 3),
            "ttft_ms": round(took.ttft_ms, 3), "ttft_over_window": round(took.ttft_ms / plain.ttft_ms, 3),
            "truncated_rows": stats.truncated, "merged": policy_of.merged, "lost": policy_of.store.stats.lost,
        }  # fmt: skip


def watch(session: Session, settings: WatchSettings, progress: Notify) -> WatchCost:
    """Watch frames of the demo's world, then ask; a first question is not counted."""
    world, chunks, ttft_ms, frames = World(0), [], [], settings.frames
    progress(f"{frames:,} frames")
    for seen in range(0, frames, settings.chunk):
        count = min(settings.chunk, frames - seen)
        images = [world.step() for _ in range(count)]
        started = time.perf_counter()
        for image in images:
            session.watch(image)
        session.flush()
        chunks.append(1e3 * (time.perf_counter() - started) / count)
        if (seen + count) % REPORT_EVERY < settings.chunk:
            progress(f"{seen + count:,} of {frames:,} frames, {median(chunks):.2f} ms each")
    before = _moved(session)
    for number in range(settings.questions + 1):
        store = session._stream.store
        if settings.cold and store is not None and store._file is not None:
            store.sync()
            forget_pages(store._file._handle)
        answer = session.ask(QUESTIONS[number % len(QUESTIONS)], max_tokens=ANSWER_TOKENS)
        answer.settle()
        ttft_ms.append(answer.ttft_ms)
    each = (_moved(session) - before) // (settings.questions + 1)
    return WatchCost(median(chunks[1:] or chunks), median(ttft_ms[1:]), int(each.sum()), int(each[1]))


def _moved(session: Session) -> NDArray[np.int64]:
    """Bytes that the store has returned so far, from host memory and from the file."""
    store = session._stream.store
    return np.array([store.stats.bytes_host, store.stats.bytes_disk] if store else [0, 0], np.int64)


def _mean(ratios: NDArray[np.float64]) -> float | None:
    """Over layers and KV heads; None where nothing was counted."""
    return None if np.isnan(ratios).any() else round(float(ratios.mean()), 4)


def _rounded(ratios: NDArray[np.float64]) -> list[list[float | None]]:
    """``[layers][kv_heads]``."""
    return [[None if math.isnan(ratio) else round(ratio, 4) for ratio in of_layer] for of_layer in ratios.tolist()]


def _per_call(stats: RetrievalStats, phase: Phase) -> dict[str, float]:
    """Milliseconds of one call in all layers; empty where there was none."""
    parts = {"predict": stats.predict_ms, "fetch": stats.fetch_ms, "compute": stats.compute_ms}
    return {name: round(ms[phase] / stats.calls[phase], 4) for name, ms in parts.items()} if stats.calls[phase] else {}

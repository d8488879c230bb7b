"""What a retrieval policy fetches, layer by layer and head by head, and what that costs beside a plain window.

A stream is watched, then questions are asked about it. The ratios are those of V-Rex's Tab. II and Fig. 20, the shares those of
its Fig. 16. The plain window has the same budget, and takes its turn in the same run.
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

from edgevlm.bench.share import Subject, opened
from edgevlm.bench.store import cold
from edgevlm.calib.demo.questions import all_questions
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.retrieval.stats import PHASES, Phase, RetrievalStats
from edgevlm.runtime.session import Session
from edgevlm.runtime.store import StoreSettings

WINDOW = "sliding-window"
QUESTIONS = [text for text in all_questions() if "<" not in text]
ANSWER_TOKENS = 8
REPORT_EVERY = 512  # frames
WAYS = {"fetched": RetrievalStats.ratio, "attended": RetrievalStats.attended, "rule": RetrievalStats.by_rule}
"""``fetched``: the share of what is below that was fetched; ``attended``: the share of window and below that was attended to;
``rule``: the share that the policy's rule chose, before anything was cut, of all that it chooses from, if the policy says.
"""


@dataclass(frozen=True, slots=True)
class Watched:
    """Medians of a frame's time and of that to a first token, the first of both left out; bytes from the store a question.

    moved: all of them; read: those from its file.
    """

    frame_ms: float
    ttft_ms: float
    moved: int
    read: int


@dataclass(frozen=True, slots=True)
class Stream:
    """What is watched and asked. budget: vision tokens per layer, None as ``run`` has it; chunk: frames encoded at once.

    host_bytes: of blocks in host memory, None as ``run`` has it; cold: before a question the kernel forgets what it has of the
    store's file, as on a machine whose memory is short.
    """

    budget: int | None
    frames: int
    questions: int
    chunk: int
    host_bytes: int | None = None
    cold: bool = False

    def open(self, subject: Subject, policy: str) -> Session:
        retrieves = isinstance(create_policy(policy), Retrieval)
        store = StoreSettings(host_bytes=self.host_bytes) if retrieves and self.host_bytes else None
        return Session.open(subject.model, policy=policy, budget=self.budget, chunk=self.chunk, store=store)


def run(
    models: Sequence[str], policies: Sequence[str], stream: Stream, threads: int | None, progress: Progress
) -> Iterator[dict[str, Any]]:
    """A line for each model and policy, as it comes. Raises UserError for a policy that retrieves nothing."""
    for text in policies:
        if not isinstance(create_policy(text), Retrieval):
            there = [name for name, policy in POLICIES.items() if issubclass(policy, Retrieval)]
            raise UserError(f"policy {text} retrieves nothing; name one of {', '.join(there)}")
    for name in models:
        with opened(name, threads or default_threads(), progress) as subject:
            progress(f"{name}, {WINDOW}: {stream.frames:,} frames")
            with stream.open(subject, WINDOW) as session:
                plain = watch(session, stream, progress)
            for text in policies:
                progress(f"{name}, {text}: {stream.frames:,} frames")
                yield measure(subject, text, stream, plain, progress)


def measure(subject: Subject, policy: str, stream: Stream, plain: Watched, progress: Progress) -> dict[str, Any]:
    """A line: what one policy fetched and took, and how much more than the plain window."""
    with stream.open(subject, policy) as session:
        took = watch(session, stream, progress)
        retrieval = session._stream.policy
        assert isinstance(retrieval, Retrieval)
        stats = retrieval.stats
        return {
            "bench": "retrieval", "model": subject.name, "policy": policy, "budget": session.budget,
            "threads": subject.threads, **{name: value for name, value in asdict(stream).items() if name != "budget"},
            "window_rows": retrieval.window_rows, "working_rows": retrieval.working_rows,
            "index_bytes": retrieval.index_bytes, "below_rows": int(retrieval.offloaded.max()),
            **{f"{phase}_ratio": mean(stats.ratio(phase)) for phase in PHASES},
            **{f"{phase}_{way}": mean(of(stats, phase)) for way, of in WAYS.items() if way != "fetched" for phase in PHASES},
            "heads": {way: {phase: rounded(of(stats, phase)) for phase in PHASES} for way, of in WAYS.items()},
            "shares": {phase: {name: round(part, 4) for name, part in stats.breakdown(phase).items()} for phase in PHASES},
            "call_ms": {phase: per_call(stats, phase) for phase in PHASES},
            "archive_ms_per_frame": round(stats.offload_ms / stream.frames, 4),
            "bytes_per_question": took.moved, "disk_bytes_per_question": took.read,
            "frame_ms": round(took.frame_ms, 3), "frame_over_window": round(took.frame_ms / plain.frame_ms, 3),
            "ttft_ms": round(took.ttft_ms, 3), "ttft_over_window": round(took.ttft_ms / plain.ttft_ms, 3),
            "cut_rows": stats.truncated, "merged": retrieval.merged, "lost": retrieval.store.stats.lost,
        }  # fmt: skip


def watch(session: Session, stream: Stream, progress: Progress) -> Watched:
    """Watch frames of the demo's world, then ask, and one question more before them."""
    world, chunks, ttft_ms, frames = World(0), [], [], stream.frames
    for seen in range(0, frames, stream.chunk):
        count = min(stream.chunk, frames - seen)
        images = [world.step() for _ in range(count)]
        started = time.perf_counter()
        for image in images:
            session.watch(image)
        session.flush()
        chunks.append(1e3 * (time.perf_counter() - started) / count)
        if (seen + count) % REPORT_EVERY < stream.chunk and seen + count < frames:
            progress(f"  {seen + count:,} frames, {median(chunks):.2f} ms each")
    before = moved(session)
    for number in range(stream.questions + 1):
        store = session._stream.store
        if stream.cold and store is not None and store._file is not None:
            store.sync()
            cold(store._file._handle)
        answer = session.ask(QUESTIONS[number % len(QUESTIONS)], max_tokens=ANSWER_TOKENS)
        answer.settle()
        ttft_ms.append(answer.ttft_ms)
    each = (moved(session) - before) // (stream.questions + 1)
    return Watched(median(chunks[1:] or chunks), median(ttft_ms[1:]), int(each.sum()), int(each[1]))


def moved(session: Session) -> NDArray[np.int64]:
    """Bytes that the store has given until now, from host memory and from the file."""
    store = session._stream.store
    return np.array([store.stats.bytes_host, store.stats.bytes_disk] if store else [0, 0], np.int64)


def mean(ratios: NDArray[np.float64]) -> float | None:
    """Over layers and KV heads; None where nothing was counted."""
    return None if np.isnan(ratios).any() else round(float(ratios.mean()), 4)


def rounded(ratios: NDArray[np.float64]) -> list[list[float | None]]:
    """``[layers][kv_heads]``."""
    return [[None if math.isnan(ratio) else round(ratio, 4) for ratio in of_layer] for of_layer in ratios.tolist()]


def per_call(stats: RetrievalStats, phase: Phase) -> dict[str, float]:
    """Milliseconds of one call in all layers; empty where there was none."""
    parts = {"predict": stats.predict_ms, "fetch": stats.fetch_ms, "compute": stats.compute_ms}
    return {name: round(ms[phase] / stats.calls[phase], 4) for name, ms in parts.items()} if stats.calls[phase] else {}

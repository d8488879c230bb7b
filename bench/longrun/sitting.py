"""One policy, one long stream: a line of JSON at each mark. Run in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import psutil

from edgevlm.bench.longrun.stream import plan, questions
from edgevlm.bench.stream.sitting import peak_rss
from edgevlm.calib.accuracy.cases import gap_name
from edgevlm.calib.accuracy.worker import moved_bytes
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.session import Session
from edgevlm.runtime.store import StoreSettings

ROOM = TextBudget(80, 80, 80)
TOLD = 500  # frames between two words of progress


@dataclass(frozen=True, slots=True)
class Work:
    """What one process measures. marks: frames, rising; budget: vision tokens per layer; bytes of the store below."""

    policy: str
    budget: int
    marks: tuple[int, ...]
    seed: int
    host_bytes: int
    file_bytes: int
    model: str = "demo"
    threads: int = 1


def sit(work: Work) -> Iterator[dict[str, Any]]:
    """Progress, ``{"frames_done": n}``, and a line a mark. Raises UserError for a policy or budget that is not one."""
    policy, rng = create_policy(work.policy), np.random.default_rng([work.seed, 2])
    world, asked = plan(work.seed, work.marks)
    store = StoreSettings(work.file_bytes, work.host_bytes) if isinstance(policy, Retrieval) else None
    with (
        closing(Model.load(work.model, threads=work.threads)) as model,
        Session.open(model, policy=policy, budget=work.budget, text_budget=ROOM, store=store) as session,
    ):
        done = 0
        for mark in work.marks:
            started, first = time.perf_counter(), done
            cpu = time.process_time()
            while done < mark:
                session.watch(world.step())
                done += 1
                if done % TOLD == 0:
                    yield {"frames_done": done}
            session.flush()
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            figures = {"fps": round((done - first) / seconds, 1), "cpu_ms_per_frame": round(1e3 * cpu / (done - first), 3)}
            answers = _ask(session, questions(world, asked[mark], rng))
            yield {"bench": "longrun", "policy": work.policy, "budget": work.budget, "seed": work.seed, "frames": mark} | {
                **figures, **_bytes(session, policy), **answers, **_counts(session, policy)
            }  # fmt: skip


def _ask(session: Session, asked: list[tuple[str, str, int | None]]) -> dict[str, Any]:
    """Each question once, after one that does not count."""
    session.ask(asked[-1][0]).wait()
    right: dict[str, list[bool]] = defaultdict(list)
    before, ttft_ms = moved_bytes(session), []
    for text, truth, gap in asked:
        answer = session.ask(text)
        said = answer.text.strip()
        ttft_ms.append(answer.ttft_ms)
        right["now" if gap == 0 else "never" if gap is None else str(gap_name(gap))].append(said == truth)
    shown = [of for name, each in right.items() if name not in ("now", "never") for of in each]
    return {
        "questions": len(asked),
        "ttft_ms_p50": round(float(np.median(ttft_ms)), 3),
        "ttft_ms_p95": round(float(np.percentile(ttft_ms, 95)), 3),
        "moved_bytes_per_question": (moved_bytes(session) - before) // len(asked),
        "right": {name: f"{sum(each)}/{len(each)}" for name, each in right.items()},
        "backward": round(float(np.mean(shown)), 4),
    }


def _bytes(session: Session, policy: Policy) -> dict[str, int]:
    store = session.store
    return {
        "device_bytes": session.cache.nbytes + policy.state_bytes,
        "host_bytes": store.host_bytes if store is not None else 0,
        "file_bytes": store.file_bytes if store is not None else 0,
        "rss_bytes": int(psutil.Process().memory_info().rss),
        "peak_rss_bytes": peak_rss(),
    }


def _counts(session: Session, policy: Policy) -> dict[str, int]:
    """What was merged, lost and cut for want of room, and how often positions were made dense."""
    counts = {"reindexings": session.stats.memory.reindexings}
    if isinstance(policy, Retrieval):
        lost = policy.store.stats.lost
        counts |= {"merged": policy.merged, "lost": lost, "cut": policy.working.truncated}
    return counts


def main() -> None:
    """The work that is written on stdin; what a user did wrong is a line with ``error``."""
    typed = json.load(sys.stdin)
    work = Work(**{field.name: typed[field.name] for field in fields(Work)} | {"marks": tuple(typed["marks"])})
    try:
        for line in sit(work):
            print(json.dumps(line), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()

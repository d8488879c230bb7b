"""Measure how long a snapshot delays the stream, compared with a frame's time, and how long it takes to write.

Once the cache is full, the session alternates between watching frames and taking snapshots. The stream waits while a snapshot
is copied, but not while it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgevlm.bench.models import open_model
from edgevlm.bench.timing import spread, time_job, timed, watching
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL
from edgevlm.runtime.snapshots.directory import SnapshotDirectory
from edgevlm.runtime.snapshots.writer import CaptureBuffer

CHUNK = 8  # frames per chunk, a session's default


def snapshot(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = ("infinipot-v", "h2o"),
    budget: int | None = None,
    rounds: int = 7,
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each model and policy. ``model``: ``demo``, SEEDED or a bundle's directory."""
    threads = threads or default_threads()
    for name, text in product(model, policy):
        with open_model(name, threads, engine) as loaded, TemporaryDirectory(prefix="edgevlm-bench-") as folder:
            show(f"{name}, {text}")
            context = {"bench": "snapshot", "model": name, "policy": text, "threads": threads}
            yield context | measure(loaded, text, budget, rounds, Path(folder))


def measure(model: Model, policy: str, budget: int | None, rounds: int, folder: Path) -> dict[str, Any]:
    """Return times in milliseconds, as medians and quartiles, and the bytes of a snapshot on disk."""
    world, state = World(0), SnapshotDirectory(folder)
    with Session.open(model, policy=policy, budget=budget, chunk=CHUNK, append=ALL, encode=ALL) as session:
        while not session.stats.memory.compressions:
            session.watch(world.step())
        buffer, turns = CaptureBuffer(session.cache.nbytes), []
        for _ in range(rounds + 1):  # the first round touches new memory and is discarded
            frame_ms = time_job(watching(session, [world.step() for _ in range(CHUNK)])).wall
            about, arrays, held_ms = session._capture(buffer)
            turns.append((frame_ms, held_ms, timed(partial(state.write, {"identity": {}, **about}, arrays))))
        size, tokens = max(path.stat().st_size for path in folder.glob("*.snapshot")), session.budget
    state.close()
    line: dict[str, Any] = {"budget": tokens, "bytes": size, "cold_hold_ms": round(turns[0][1], 3)}
    for name, column in zip(("frame", "hold", "write"), zip(*turns[1:], strict=True), strict=True):
        line |= spread(column, f"{name}_ms", f"{name}_low", f"{name}_high")
    return line | {"hold_over_frame": round(line["hold_ms"] / line["frame_ms"], 4)}

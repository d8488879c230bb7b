"""How long a snapshot holds the stream, beside the time of a frame, and how long it then takes to be on disk.

A memory is filled until its policy compresses. Then turns are measured: a chunk is watched, and a snapshot is taken, copied on
the stream's time and written on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.rounds import quartiles
from edgevlm.bench.share import CHUNK, SEEDED, SEEDED_BUDGET, Subject, opened
from edgevlm.bench.timing import timed
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots.capture import CaptureBuffer
from edgevlm.runtime.snapshots.directory import SnapshotDirectory


@dataclass(frozen=True, slots=True)
class Hold:
    """Quartiles and medians, in milliseconds; cold_hold_ms: of the first snapshot. bytes: of one on disk."""

    model: str
    policy: str
    budget: int
    threads: int
    bytes: int
    cold_hold_ms: float
    frame: tuple[float, float, float]
    hold: tuple[float, float, float]
    write: tuple[float, float, float]

    def line(self) -> dict[str, Any]:
        head = {name: getattr(self, name) for name in ("model", "policy", "budget", "threads", "bytes")}
        parts = {"frame": self.frame, "hold": self.hold, "write": self.write}
        medians = {f"{name}_ms": round(part[1], 3) for name, part in parts.items()}
        ratio = {"hold_over_frame": round(self.hold[1] / self.frame[1], 4)}
        ends = [(name, end, part[place]) for name, part in parts.items() for end, place in (("low", 0), ("high", 2))]
        spread = {f"{name}_{end}": round(value, 3) for name, end, value in ends}
        return {"bench": "snapshot", **head, **medians, **ratio, **spread, "cold_hold_ms": round(self.cold_hold_ms, 3)}


def run(
    models: Sequence[str], policies: Sequence[str], budget: int | None, rounds: int, threads: int | None, out: Path | None,
    progress: Progress,
) -> Iterator[Hold]:  # fmt: skip
    """A result for each model (``demo``, SEEDED or a bundle's folder) and policy, as it comes; ``out``: where to write."""
    for name in models:
        with opened(name, threads or default_threads(), progress) as subject:
            for policy in policies:
                progress(f"{name}, {policy}")
                tokens = SEEDED_BUDGET if budget is None and name == SEEDED else budget
                with TemporaryDirectory(dir=out, prefix="edgevlm-bench-") as folder:
                    yield measure(subject, policy, tokens, rounds, Path(folder))


def measure(subject: Subject, policy: str, budget: int | None, rounds: int, folder: Path) -> Hold:
    """Fill a session's memory, then take turns: a chunk, a snapshot."""
    world, state = World(0), SnapshotDirectory(folder)
    with Session.open(subject.model, policy=policy, budget=budget, chunk=CHUNK) as session:
        with subject.noise.filling() if subject.noise else nullcontext():
            while not session.stats.memory.compressions:
                session.watch(world.step())
        copies, turns = CaptureBuffer(session.cache.nbytes), []
        for _ in range(rounds + 1):  # the first touches new memory, and does not count
            frames = [world.step() for _ in range(CHUNK)]
            frame_ms = timed(partial(watch, session, frames)) / CHUNK
            about, arrays, held_ms = session._capture(copies)
            turns.append((frame_ms, held_ms, timed(partial(state.write, {"identity": {}, **about}, arrays))))
        spreads = [quartiles(column) for column in zip(*turns[1:], strict=True)]
        size = max(path.stat().st_size for path in folder.glob("*.snapshot"))
        tokens = session._stream.budget
    state.close()
    return Hold(subject.name, policy, tokens, subject.threads, size, turns[0][1], *spreads)


def watch(session: Session, frames: Sequence[NDArray[np.uint8]]) -> None:
    for frame in frames:
        session.watch(frame)

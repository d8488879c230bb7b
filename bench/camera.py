"""Source-to-answer latency by stage: what happens to a frame from when it is there until an answer that has seen it begins.

Each frame is watched and asked about at once (a chunk of one, an answer of one token), so that every stage comes with every
frame. ``busy`` is the watching thread's own time for a frame without its answer, ``total`` runs from when the picture was there
to the answer's first token. With ``inline`` a frame is prepared by the thread that watches, for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from edgevlm.apps.run.frame_preparation import FramePreparation
from edgevlm.apps.sources import Frame, Source, SourceOptions, open_source
from edgevlm.apps.sources.base import StageTimer
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

STAGES = ("capture", "decode", "convert", "preprocess", "wait", "encode", "prefill", "compress", "busy", "answer", "total")
QUESTION = "how many objects are there now?"  # of whatever model: the answer is not looked at
WARM_UP = 2  # frames that do not count


@dataclass(frozen=True, slots=True)
class CameraBench:
    """What to measure. ``frames``: those that count; ``inline``: nothing is done ahead of the thread that watches."""

    camera: str | None
    video: str | None
    model: str = "demo"
    frames: int = 64
    inline: bool = False
    threads: int | None = None
    options: SourceOptions = field(default_factory=SourceOptions)


@dataclass(frozen=True, slots=True)
class Stage:
    """Milliseconds of one stage over ``frames`` frames."""

    source: str
    stage: str
    ms_p50: float
    ms_p95: float
    frames: int
    how: dict[str, object]  # model, threads, inline, realtime

    def line(self) -> dict[str, object]:
        return {
            "bench": "camera", "source": self.source, "stage": self.stage, "ms_p50": round(self.ms_p50, 3),
            "ms_p95": round(self.ms_p95, 3), "frames": self.frames, **self.how,
        }  # fmt: skip


def run(bench: CameraBench) -> Iterator[Stage]:
    """Measure; yields stages in the order of STAGES, those there were. Raises UserError where the source has too few frames."""
    threads = bench.threads or default_threads()
    how = {"model": bench.model, "threads": threads, "inline": bench.inline, "realtime": bench.options.realtime}
    source = open_source(bench.camera, bench.video, bench.options)
    try:
        with closing(Model.load(bench.model, threads=bench.threads)) as model, Session.open(model, chunk=1) as session:
            measured = _measure(source, session, bench)
    finally:
        source.close()
    for stage in STAGES:
        if values := [laps[stage] for laps in measured if stage in laps]:
            p50, p95 = np.percentile(values, [50, 95])
            yield Stage(source.name, stage, float(p50), float(p95), len(values), how)


def _measure(source: Source, session: Session, bench: CameraBench) -> list[dict[str, float]]:
    finish = FramePreparation(session.prepare)
    if not bench.inline:
        source.prepare = finish
    measured: list[dict[str, float]] = []
    while len(measured) < bench.frames + WARM_UP and (frame := source.read()) is not None:
        assert frame.timer is not None
        frame.timer.mark("wait")
        measured.append(_watch_and_ask(session, frame, frame.timer, finish if bench.inline else None))
    if len(measured) <= WARM_UP:
        raise UserError(f"{source.name}: {len(measured)} frames are too few to measure; give a longer clip, or a larger --fps")
    return measured[WARM_UP:]


def _watch_and_ask(session: Session, frame: Frame, timer: StageTimer, finish: FramePreparation | None) -> dict[str, float]:
    taken = time.monotonic()
    frame = finish(frame) if finish else frame
    assert frame.pixels is not None
    before, memory = session.stats, session.stats.memory
    prefill, compress = memory.prefill_ms, memory.compress_ms + memory.guidance_ms
    session.watch(frame.pixels, frame.time_s)
    busy, after = time.monotonic() - taken, session.stats
    spent = {
        **timer.ms,
        "encode": after.encode_ms - before.encode_ms,
        "prefill": after.memory.prefill_ms - prefill,
        "compress": after.memory.compress_ms + after.memory.guidance_ms - compress,
    }
    spent["busy"] = 1e3 * busy
    answer = session.ask(QUESTION, max_tokens=1)
    answer.wait()
    return {**spent, "answer": answer.ttft_ms, "total": 1e3 * (time.monotonic() - timer.captured_s)}

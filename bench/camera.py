"""Latency from camera to answer, by stage: from when a frame exists until an answer that has seen it begins.

Each frame is watched and asked about at once (a chunk of one, an answer of one token), so that every stage comes with every
frame. ``busy`` is the watching thread's own time for a frame without its answer, ``total`` runs from when the picture was there
to the answer's first token. With ``inline`` a frame is prepared by the thread that watches, for comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from edgevlm.apps.run.frame_preparation import FramePreparation
from edgevlm.apps.sources import Frame, Source, SourceOptions, open_source
from edgevlm.apps.sources.base import StageTimer
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

STAGES = ("capture", "decode", "preprocess", "wait", "encode", "prefill", "compress", "busy", "answer", "total")
QUESTION = "how many objects are there now?"  # of whatever model: the answer is not looked at
WARM_UP = 2  # frames that do not count


def camera(
    camera: str | None = None,
    video: str | None = None,
    model: str = "demo",
    frames: int = 20,
    fps: float = 2.0,
    realtime: bool = True,
    inline: bool = False,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each stage there was, in the order of STAGES: milliseconds over ``frames`` frames, after two to warm up.

    ``inline``: nothing is done ahead of the thread that watches. Raises UserError where the source has too few frames.
    """
    source = open_source(camera, video, SourceOptions(fps=fps, realtime=realtime))
    context = {"model": model, "threads": threads or default_threads(), "inline": inline, "realtime": realtime}
    try:
        with closing(Model.load(model, threads=threads)) as loaded, Session.open(loaded, chunk=1, append=ALL) as session:
            measured = _measure(source, session, frames, inline, progress)
    finally:
        source.close()
    for stage in STAGES:
        if values := [stages[stage] for stages in measured if stage in stages]:
            p50, p95 = (round(float(value), 3) for value in np.percentile(values, [50, 95]))
            about = {"bench": "camera", "source": source.name, "stage": stage}
            yield {**about, "ms_p50": p50, "ms_p95": p95, "frames": len(values), **context}


def _measure(source: Source, session: Session, frames: int, inline: bool, progress: Notify) -> list[dict[str, float]]:
    prepare = FramePreparation(session.prepare)
    if not inline:
        source.prepare = prepare
    measured: list[dict[str, float]] = []
    while len(measured) < frames + WARM_UP and (frame := source.read()) is not None:
        assert frame.timer is not None
        frame.timer.mark("wait")
        measured.append(_watch_and_ask(session, frame, frame.timer, prepare if inline else None))
        progress(f"{source.name}: frame {len(measured)} of {frames + WARM_UP}")
    if len(measured) <= WARM_UP:
        raise UserError(f"{source.name}: {len(measured)} frames are too few to measure; give a longer clip, or a larger --fps")
    return measured[WARM_UP:]


def _watch_and_ask(session: Session, frame: Frame, timer: StageTimer, prepare: FramePreparation | None) -> dict[str, float]:
    taken = time.monotonic()
    frame = prepare(frame) if prepare else frame
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

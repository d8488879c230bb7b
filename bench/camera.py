"""Measure how long it takes to answer a question about a frame that has just arrived, stage by stage.

After each frame comes a question, whose answer is one token. ``busy`` is how long the watching thread works on a frame,
excluding the answer. ``total`` is the time from the picture's arrival to the answer's first token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from edgevlm.apps.sources import Frame, SourceOptions, open_source
from edgevlm.bench.timing import parts_ms, percentiles
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

STAGES = ("capture", "decode", "preprocess", "wait", "encode", "prefill", "compress", "busy", "answer", "total")
QUESTION = "how many objects are there now?"  # suits any model, because the answer is ignored
WARM_UP = 2


def camera(
    camera: str | None = None,
    video: str | None = None,
    model: str = "demo",
    frames: int = 20,
    fps: float = 2.0,
    realtime: bool = True,
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the latency of each stage, as percentiles in milliseconds over ``frames`` frames.

    Two warm-up frames are not counted. Raises UserError if the source has too few frames.
    """
    context = {"model": model, "threads": threads or default_threads(), "realtime": realtime}
    measured: list[dict[str, float]] = []
    with (
        closing(open_source(camera, video, SourceOptions(fps=fps, realtime=realtime))) as source,
        closing(Model.load(model, engine=engine, threads=threads)) as loaded,
        Session.open(loaded, chunk=1, append=ALL, encode=ALL) as session,
    ):
        source.prepare = session.prepare
        while len(measured) < frames + WARM_UP and (frame := source.read()) is not None:
            measured.append(_watch_and_ask(session, frame))
            show(f"{source.name}: frame {len(measured)} of {frames + WARM_UP}")
        if len(measured) <= WARM_UP:
            raise UserError(f"{source.name}: {len(measured)} frames are too few; use a longer clip, or a higher --fps")
    for stage in STAGES:
        if values := [stages[stage] for stages in measured[WARM_UP:] if stage in stages]:
            about = {"bench": "camera", "source": source.name, "stage": stage}
            yield {**about, **percentiles(values, "ms", (50, 95)), "frames": len(values), **context}


def _watch_and_ask(session: Session, frame: Frame) -> dict[str, float]:
    assert frame.timer is not None
    assert frame.pixels is not None
    frame.timer.mark("wait")
    taken, before, guided = time.monotonic(), parts_ms(session), session.stats.memory.guidance_ms
    session.watch(frame.pixels, frame.time_s)
    busy = 1e3 * (time.monotonic() - taken)
    encode, prefill, compress = (after - before[part] for part, after in parts_ms(session).items())
    spent = {"encode": encode, "prefill": prefill, "compress": compress + session.stats.memory.guidance_ms - guided}
    answer = session.ask(QUESTION, max_tokens=1)
    answer.wait()
    total = 1e3 * (time.monotonic() - frame.timer.captured_s)
    return {**frame.timer.ms, **spent, "busy": busy, "answer": answer.ttft_ms, "total": total}

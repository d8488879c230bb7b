"""Whole frames beside only what changed: one model, the same clips, a chunk in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from edgevlm.bench.clips import CLIPS, Image, open_clip
from edgevlm.bench.models import SEEDED, open_checkpoint
from edgevlm.bench.timing import Job, Took, figures, ratio, time_job
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import parse_append, parse_encode

POLICY = "infinipot-v"
BUDGET = 8  # frames, unless one is given
PARTS = ("vision_ms", "prefill_ms", "compress_ms")


@dataclass(slots=True)
class TimedStream:
    """A session, what each of its chunks took, and its counters after each; the first chunk is not counted."""

    session: Session
    took: list[Took] = field(default_factory=list)
    counters: list[tuple[float, ...]] = field(default_factory=list)

    def watch(self, images: Sequence[Image]) -> None:
        for image in images:
            self.session.watch(image)

    def chunk(self, images: Sequence[Image]) -> None:
        self.took.append(time_job(Job(lambda: self.watch(images), len(images))))
        stats, memory = self.session.stats, self.session.stats.memory
        times = (stats.encode_ms, memory.prefill_ms, memory.compress_ms + memory.reindex_ms)
        counts = (memory.tokens_seen, memory.tokens_appended, stats.frames * stats.encoded)
        self.counters.append((*times, *counts))

    def line(self, frames: int) -> dict[str, Any]:
        """Medians over the warm chunks, which hold so many ``frames``."""
        *parts, seen, appended, encoded = (
            last - first for first, last in zip(self.counters[0], self.counters[-1], strict=True)
        )
        frame = figures("frame", self.took[1:])
        return {
            "fps": round(1e3 / frame["ms_per_frame"], 3), **frame,
            **{name: round(ms / frames, 3) for name, ms in zip(PARTS, parts, strict=True)},
            "appended": round(appended / seen, 4) if seen else 1.0, "encoded": round(encoded / frames, 4),
            "tower_mb": round(self.session.stats.tower_bytes / 1e6, 1),
        }  # fmt: skip


def changed(
    model: Sequence[str] = (SEEDED,),
    policy: Sequence[str] = (POLICY,),
    append: Sequence[str] = ("all", "changed"),
    encode: Sequence[str] = ("all", "changed"),
    clips: Sequence[str] = tuple(CLIPS),
    budget: int | None = None,
    fps: float = 2.0,
    frames: Sequence[int] = (40,),
    chunk: Sequence[int] = (8,),
    precisions: Sequence[str] = ("int8",),
    layers: int | None = None,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each clip, ``append`` and ``encode``, of each model and policy; ratios are to a clip's first line.

    Sessions of one model watch the same frames, a chunk in turn; before a clip every memory is full. ``ceiling``: the ratio if
    tower and prefill took as much less as the fractions say. ``model``: a bundle, or SEEDED, exported for the occasion, with
    so many ``layers`` of tower and decoder, all unless given. Raises UserError for less than three chunks, the first of which
    is not counted.
    """
    threads, size = threads or default_threads(), chunk[0]
    if (count := frames[-1] // size * size) < 3 * size:
        raise UserError(f"--frames {frames[-1]}: give three chunks of {size} or more; the first is not counted")
    for clip in clips:
        open_clip(clip, fps)
    for way, look in product(append, encode):
        parse_append(way), parse_encode(look)
    for name, precision in product(model, precisions):
        with bundle_of(name, precision, layers, progress) as folder, closing(Model.load(folder, threads=threads)) as loaded:
            tokens = budget or BUDGET * loaded.bundle.vision.tokens_per_frame
            for text, clip in product(policy, clips):
                place = {
                    "bench": "stream-changed", "model": name, "precision": precision, "clip": Path(clip).name, "policy": text,
                    "layers": loaded.bundle.decoder.layers, "budget": tokens, "chunk": size, "frames": count - size,
                    "threads": threads,
                }  # fmt: skip
                with ExitStack() as stack:
                    sides = {
                        (way, look): TimedStream(stack.enter_context(
                            Session.open(loaded, policy=text, budget=tokens, chunk=size, append=way, encode=look)
                        ))
                        for way, look in product(append, encode)
                    }  # fmt: skip
                    progress(f"{clip}: filling {tokens:,} tokens")
                    for side in sides.values():
                        fill(side.session, size)
                    images = open_clip(clip, fps)
                    for number in range(count // size):
                        progress(f"{clip}: chunk {number + 1} of {count // size}")
                        of_chunk = list(islice(images, size))
                        for side in list(sides.values())[:: 1 if number % 2 else -1]:
                            side.chunk(of_chunk)
                first = next(iter(sides.values()))
                full = first.line(count - size)
                for (way, look), side in sides.items():
                    line = side.line(count - size)
                    yield {**place, "append": way, "encode": look, **line, **compared(full, line, first, side)}


def compared(full: dict[str, Any], line: dict[str, Any], first: TimedStream, side: TimedStream) -> dict[str, Any]:
    """How many times the frames a second of ``full``, and the ``ceiling`` that the fractions allow."""
    faster = ratio(first.took[1:], side.took[1:])
    fractions = (("prefill_ms", "appended"), ("vision_ms", "encoded"))
    saved = sum(full[part] * (1 - line[fraction] / full[fraction]) for part, fraction in fractions)
    frame = fmean(once.wall for once in first.took[1:])  # not its median: the stages' times are means
    return {
        "fps_ratio": faster["ratio"], "low": faster["low"], "high": faster["high"], "cpu_ratio": faster["cpu_ratio"],
        "ceiling": round(frame / (frame - saved), 3),
    }  # fmt: skip


def fill(session: Session, chunk: int) -> None:
    """Watch noise, in which everything changes, until the memory is full."""
    random, most = np.random.default_rng(0), 4 * session.budget // session.model.bundle.vision.tokens_per_frame + chunk
    for _ in range(-(-most // chunk)):
        for _ in range(chunk):
            session.watch(random.integers(0, 256, (*session.model.bundle.vision.size, 3), np.uint8))
        if session.stats.memory.compressions:
            return
    raise UserError(f"{session.policy} does not compress within {most} frames of noise; lower --budget")


@contextmanager
def bundle_of(name: str, precision: str, layers: int | None, progress: Notify) -> Iterator[str | Path]:
    """Yield a bundle's directory, or ``demo``; SEEDED is written and exported into a temporary directory."""
    if name != SEEDED:
        if layers is not None:
            raise UserError(f"--layers: is of {SEEDED}, and {name} has its own")
        yield name
        return
    with open_checkpoint(name, layers, progress) as (folder, temporary):
        from edgevlm.export import export_checkpoint

        progress(f"exporting {SEEDED}: {precision}")
        tower = "int8" if precision.startswith("int") else "fp32"
        yield export_checkpoint(folder, temporary / precision, precision=precision, vision_precision=tower)

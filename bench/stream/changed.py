"""Compare watching whole frames with watching only what changed, on the same model and clips."""

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
from edgevlm.bench.timing import Took, figures, parts_ms, ratio, time_job, watching
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import parse_append, parse_encode

BUDGET = 8  # default budget, in frames


@dataclass(slots=True)
class TimedStream:
    """A session, with each chunk's time and counters. Medians exclude the first chunk."""

    session: Session
    took: list[Took] = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)

    def chunk(self, images: Sequence[Image]) -> None:
        self.took.append(time_job(watching(self.session, images)))
        stats, memory = self.session.stats, self.session.stats.memory
        counts = {"seen": memory.tokens_seen, "appended": memory.tokens_appended, "encoded": stats.frames * stats.encoded}
        self.counters.append({**parts_ms(self.session), **counts})

    def line(self, frames: int) -> dict[str, Any]:
        """Return medians that exclude the first chunk. ``frames``: the number of frames after the first chunk."""
        first, last = self.counters[0], self.counters[-1]
        more, frame = {name: last[name] - first[name] for name in last}, figures("frame", self.took[1:])
        return {
            "fps": round(1e3 / frame["ms_per_frame"], 3), **frame,
            **{name: round(more[name] / frames, 3) for name in more if name.endswith("_ms")},
            "appended": round(more["appended"] / more["seen"], 4) if more["seen"] else 1.0,
            "encoded": round(more["encoded"] / frames, 4), "tower_mb": round(self.session.stats.tower_bytes / 1e6, 1),
        }  # fmt: skip


def changed(
    model: Sequence[str] = (SEEDED,),
    policy: Sequence[str] = ("infinipot-v",),
    append: Sequence[str] = ("all", "changed"),
    encode: Sequence[str] = ("all", "changed"),
    clips: Sequence[str] = tuple(CLIPS),
    budget: int | None = None,
    frames: int = 40,
    chunk: int = 8,
    precisions: Sequence[str] = ("int8",),
    layers: int | None = None,
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each model, policy, clip, ``append`` and ``encode``. Ratios are relative to the clip's first line.

    Sessions of one model take turns watching the same chunks, starting with a full memory. ``ceiling``: the speedup that would
    result if the tower and prefill took no time for unchanged patches. ``model``: a bundle or SEEDED. ``layers``: how many
    layers SEEDED's tower and decoder have (default: all). Raises UserError for fewer than three chunks.
    """
    threads, count, ways = threads or default_threads(), frames // chunk, list(product(append, encode))
    if count < 3:
        raise UserError(f"--frames {frames}: set at least three chunks of {chunk}; the first is not counted")
    for clip in clips:
        open_clip(clip)
    for way, look in ways:
        parse_append(way), parse_encode(look)
    for name, precision in product(model, precisions):
        with (
            bundle_of(name, precision, layers) as folder,
            closing(Model.load(folder, engine=engine, threads=threads)) as loaded,
        ):
            tokens = budget or BUDGET * loaded.bundle.vision.tokens_per_frame
            for text, clip in product(policy, clips):
                with ExitStack() as stack:
                    sides = []
                    for way, look in ways:
                        session = Session.open(loaded, policy=text, budget=tokens, chunk=chunk, append=way, encode=look)
                        sides.append(TimedStream(stack.enter_context(session)))
                        show(f"{clip}: filling {tokens:,} tokens")
                        fill(sides[-1].session, chunk)
                    images = open_clip(clip)
                    for number in range(count):
                        show(f"{clip}: chunk {number + 1} of {count}")
                        of_chunk = list(islice(images, chunk))
                        for side in sides[:: 1 if number % 2 else -1]:
                            side.chunk(of_chunk)
                warm = (count - 1) * chunk
                full = sides[0].line(warm)
                for (way, look), side in zip(ways, sides, strict=True):
                    line = side.line(warm)
                    yield {
                        "bench": "stream-changed", "model": name, "precision": precision, "clip": Path(clip).name,
                        "policy": text, "layers": loaded.bundle.decoder.layers, "budget": tokens, "chunk": chunk,
                        "frames": warm, "threads": threads, "append": way, "encode": look, **line,
                        **ratio(sides[0].took[1:], side.took[1:], "fps_ratio"), "ceiling": ceiling(full, line, sides[0]),
                    }  # fmt: skip


def ceiling(full: dict[str, Any], line: dict[str, Any], first: TimedStream) -> float:
    """Return the speedup over ``full`` that would result if the tower and prefill took no time for unchanged patches."""
    fractions = (("prefill_ms", "appended"), ("vision_ms", "encoded"))
    saved = sum(full[part] * (1 - line[fraction] / full[fraction]) for part, fraction in fractions)
    frame = fmean(once.wall for once in first.took[1:])  # a mean, because the stages' times are means
    return round(frame / (frame - saved), 3)


def fill(session: Session, chunk: int) -> None:
    """Watch frames of noise, in which every patch changes, until the memory is full."""
    random, most = np.random.default_rng(0), 4 * session.budget // session.model.bundle.vision.tokens_per_frame + chunk
    for _ in range(-(-most // chunk)):
        for _ in range(chunk):
            session.watch(random.integers(0, 256, (*session.model.bundle.vision.size, 3), np.uint8))
        if session.stats.memory.compressions:
            return
    raise UserError(f"{session.policy} did not compress within {most} frames of noise; lower --budget")


@contextmanager
def bundle_of(name: str, precision: str, layers: int | None) -> Iterator[str | Path]:
    """Yield a bundle's path. SEEDED is first exported to a temporary bundle."""
    if name != SEEDED:
        if layers is not None:
            raise UserError(f"--layers: is supported only with {SEEDED}, not {name}")
        yield name
        return
    with open_checkpoint(name, layers) as (folder, temporary):
        from edgevlm.export import export_checkpoint

        show(f"exporting {SEEDED}: {precision}")
        tower = "int8" if precision.startswith("int") else "fp32"
        yield export_checkpoint(folder, temporary / precision, precision=precision, vision_precision=tower)

"""What a frame's time goes to once the memory is full, and compression's share of it.

A memory is filled until its policy compresses. From then on chunks are watched as a session does it, in whole cycles from one
compression to the next, and every part of their time is divided by their frames; the first cycle is cold and apart. A
re-indexing comes once in hundreds of frames: one is timed by itself and shared out over those between two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgevlm.bench.noise import NoiseEngine
from edgevlm.bench.rounds import quartiles
from edgevlm.bench.timing import timed
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.runtime.auto import AUTO, FALLBACK, chosen_policy
from edgevlm.runtime.budget import TextBudget, default_budget
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.stats import MemoryStats
from edgevlm.runtime.stream import Stream

SEEDED = "seeded-0.5b"
SEEDED_BUDGET = 6144
TOKENS_PER_FRAME = 196
FRAMES, DEMO_FRAMES = 16, 1024
CHUNK = 8  # a session's
PARTS = ("vision_ms", "prefill_ms", "compress_ms", "guidance_ms", "reindex_ms")


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model, under the name it was asked for."""

    name: str
    model: Model
    threads: int

    @property
    def noise(self) -> NoiseEngine | None:
        """Its engine, if that can fill a memory with noise."""
        return self.model.engine if isinstance(self.model.engine, NoiseEngine) else None


@dataclass(frozen=True, slots=True)
class Share:
    """Milliseconds a frame. ``vision_ms`` is None where the features are noise; ``guidance_ms`` is no part of compression.

    cycles: a frame's time and compression's share of it, of each cycle measured; cold_frame_ms: a frame of the first one.
    """

    model: str
    policy: str
    budget: int
    threads: int
    frames: int
    vision_ms: float | None
    prefill_ms: float
    compress_ms: float
    guidance_ms: float
    reindex_ms: float
    cycles: Sequence[tuple[float, float]]
    cold_frame_ms: float

    @property
    def frame_ms(self) -> float:
        return (self.vision_ms or 0.0) + self.prefill_ms + self.compress_ms + self.guidance_ms + self.reindex_ms

    @property
    def share(self) -> float:
        return self.compress_ms / self.frame_ms

    def line(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("frame_ms", *PARTS)}
        return {
            "bench": "share",
            "model": self.model,
            "policy": self.policy,
            "budget": self.budget,
            "threads": self.threads,
            "frames": self.frames,
            "fps": round(1e3 / self.frame_ms, 3),
            **{name: None if ms is None else round(ms, 4) for name, ms in parts.items()},
            "share": round(self.share, 6),
            **self._spread(),
            "cold_frame_ms": round(self.cold_frame_ms, 4),
        }

    def _spread(self) -> dict[str, float]:
        """Quartiles of the cycles."""
        (low, _, high), (least, _, most) = (quartiles(column) for column in zip(*self.cycles, strict=True))
        named = {"frame_low": low, "frame_high": high, "share_low": least, "share_high": most}
        return {name: round(value, 6) for name, value in named.items()}


def run(
    models: Sequence[str],
    policies: Sequence[str],
    budget: int | None,
    frames: int | None,
    threads: int | None,
    progress: Progress,
) -> Iterator[Share]:
    """A result for each model (``demo``, SEEDED or a bundle's folder) and policy, as it comes.

    budget: SEEDED_BUDGET for the seeded model and the model's own by default. frames: rounded up to whole cycles; DEMO_FRAMES
    for the demo and FRAMES for others by default. Raises UserError for a policy that never compresses.
    """
    for text in policies:
        if text != AUTO and not create_policy(text).bounded:
            bounded = ", ".join(name for name, policy in POLICIES.items() if policy.bounded)
            raise UserError(f"policy {text} never compresses; name one of {bounded}")
    for name in models:
        with opened(name, threads or default_threads(), progress) as subject:
            tokens = SEEDED_BUDGET if budget is None and name == SEEDED else budget
            count = frames or (DEMO_FRAMES if subject.model.is_demo else FRAMES)
            for text in policies:
                yield measure(subject, text, tokens, count, progress)


@contextmanager
def opened(name: str, threads: int, progress: Progress) -> Iterator[Subject]:
    """A loaded model; the seeded one is written to a folder that goes again."""
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        if name == SEEDED:
            seeded = needed("edgevlm.bench.seeded", "a model of random weights")
            progress(f"{SEEDED}: writing random weights")
            model = seeded.seeded_model(Path(folder), seeded.llava_onevision_05b(), TOKENS_PER_FRAME, threads)
        else:
            model = Model.load(name, threads=threads)
        try:
            yield Subject(name, model, threads)
        finally:
            model.close()


def measure(subject: Subject, policy: str, budget: int | None, frames: int, progress: Progress) -> Share:
    """Fill a stream's memory, then watch ``frames`` frames and to the end of the cycle."""
    stream, noise = open_stream(subject.model, policy, budget), subject.noise
    watch = Watcher(subject.model, stream)
    progress(f"{subject.name}, {policy}: filling {stream.budget:,} tokens{' with noise' if noise else ''}")
    with noise.filling() if noise else nullcontext():
        watch.cycle()
    progress(f"{subject.name}, {policy}: a cycle that does not count, then {frames} frames")
    first = watch.cycle()
    stats, vision_ms, seen, cycles = MemoryStats(), 0.0, 0, list[tuple[float, float]]()
    while seen < frames:
        now = watch.cycle()
        cycles.append((now.frame_ms, now.share))
        seen, vision_ms = seen + now.frames, vision_ms + now.vision_ms
        stats.prefill_ms += now.stats.prefill_ms
        stats.compress_ms += now.stats.compress_ms
        stats.guidance_ms += now.stats.guidance_ms
    return Share(
        model=subject.name,
        policy=stream.policy.name if policy == AUTO else policy,
        budget=stream.budget,
        threads=subject.threads,
        frames=seen,
        vision_ms=None if noise else vision_ms / seen,
        prefill_ms=stats.prefill_ms / seen,
        compress_ms=stats.compress_ms / seen,
        guidance_ms=stats.guidance_ms / seen,
        reindex_ms=reindex_ms(stream) / frames_between_reindexings(stream),
        cycles=cycles,
        cold_frame_ms=first.frame_ms,
    )


def open_stream(model: Model, policy: str, budget: int | None) -> Stream:
    """The stream of a session with these."""
    named, room = create_policy(FALLBACK if policy == AUTO else policy), TextBudget.fitting(model.bundle.limit)
    prefix = model.encode(Chat(model.bundle.chat).prefix)
    text = room.rows(model)
    tokens = budget or default_budget(model, named, model.bundle.limit - len(prefix) - text)
    chosen = chosen_policy(model.bundle, tokens)[0] if policy == AUTO else named
    return Stream(model, chosen, tokens, prefix, text, "lazy")


@dataclass(frozen=True, slots=True)
class Cycle:
    """From one compression to the next: frames, the vision tower's time, 0 where features are noise, and the stream's."""

    frames: int
    vision_ms: float
    stats: MemoryStats

    @property
    def frame_ms(self) -> float:
        """Without re-indexing."""
        return (self.vision_ms + self.stats.prefill_ms + self.stats.compress_ms + self.stats.guidance_ms) / self.frames

    @property
    def share(self) -> float:
        return self.stats.compress_ms / self.frames / self.frame_ms


class Watcher:
    """Watches the demo world with a stream."""

    def __init__(self, model: Model, stream: Stream) -> None:
        self._noise = isinstance(model.engine, NoiseEngine)
        self._model, self._stream, self._world = model, stream, World(0)
        self._preprocess = Preprocessor(model.bundle.vision)

    def cycle(self) -> Cycle:
        """Watch chunks up to one that compresses."""
        self._stream.stats, frames, vision_ms = MemoryStats(), 0, 0.0
        while not self._stream.stats.compressions:
            vision_ms += self.chunk()
            frames += CHUNK
        return Cycle(frames, 0.0 if self._noise else vision_ms, self._stream.stats)

    def chunk(self) -> float:
        """Watch one; the vision tower's milliseconds."""
        pixels = np.stack([self._preprocess(self._world.step()) for _ in range(CHUNK)])
        started = time.perf_counter()
        features = self._model.engine.encode(pixels)
        took = 1e3 * (time.perf_counter() - started)
        self._stream.append_frames(features)
        return took


def reindex_ms(stream: Stream) -> float:
    """Milliseconds of one re-indexing of what is held."""
    return timed(lambda: stream.positions.compact(stream.cache, stream.prefix))


def frames_between_reindexings(stream: Stream) -> float:
    """Just after one: how many frames it is to the next, not less than one."""
    positions = stream.positions
    free = positions.limit - positions.margin - positions.next
    return max(1.0, free / stream.policy.shape.tokens_per_frame)

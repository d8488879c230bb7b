"""Where a frame's time goes once the cache is full, and compression's part of it.

A cache is filled until its policy compresses. From then on chunks are watched as a session does it, in whole cycles from one
compression to the next, and each part of their time is divided by their frames; the first cycle is cold and apart. A
re-indexing comes once in hundreds of frames: one is timed by itself and divided by the frames between two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgevlm.apps.planning.model import plan_bundle
from edgevlm.apps.planning.speed import Roofline, speed_of
from edgevlm.apps.planning.this_machine import this_cpu
from edgevlm.bench.models import budget_of, check_policies, filling, has_noise, open_model
from edgevlm.bench.output import prefixed
from edgevlm.bench.timing import spread, timed
from edgevlm.calib.demo.world import World
from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.threads import default_threads
from edgevlm.progress import Notify
from edgevlm.runtime.budget import TextBudget, default_budget
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import AUTO, FALLBACK, chosen_policy
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.stats import MemoryStats
from edgevlm.runtime.stream import Stream

FRAMES, DEMO_FRAMES = 16, 1024
CHUNK = 8  # a session's
PARTS = ("vision_ms", "prefill_ms", "compress_ms", "guidance_ms")


def breakdown(
    model: Sequence[str] = ("demo",),
    policy: Sequence[str] = ("infinipot-v", "hermes", "purekv"),
    budget: int | None = None,
    frames: Sequence[int] = (),
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model (``demo``, SEEDED or a bundle's directory) and policy.

    ``frames``: measured ones, rounded up to whole cycles; DEMO_FRAMES for the demo and FRAMES for others by default. Raises
    UserError for a policy that never compresses.
    """
    check_policies(policy, lambda one: one.bounded, "never compresses")
    for name in model:
        with open_model(name, threads or default_threads(), progress) as loaded:
            count = frames[0] if frames else DEMO_FRAMES if loaded.is_demo else FRAMES
            place = {"bench": "breakdown", "model": name}
            for text in policy:
                line = measure(loaded, text, budget_of(name, budget), count, prefixed(progress, name))
                predicted = predicted_fps(loaded, line["budget"], threads or default_threads())
                yield place | line | {"threads": threads or default_threads(), "predicted_fps": predicted}


def measure(model: Model, policy: str, budget: int | None, frames: int, progress: Notify) -> dict[str, Any]:
    """Fill a stream's cache, then watch ``frames`` frames and on to the end of the cycle; milliseconds a frame.

    ``vision_ms`` is None where features are noise; ``guidance_ms`` is no part of compression.
    """
    stream = open_stream(model, policy, budget)
    watcher = DemoStream(model, stream)
    progress(f"{policy}: filling {stream.budget:,} tokens{' with noise' if has_noise(model) else ''}")
    with filling(model):
        watcher.cycle()
    progress(f"{policy}: a cycle to warm up, then {frames} frames")
    cold, cycles = watcher.cycle(), list[Cycle]()
    while (seen := sum(cycle.frames for cycle in cycles)) < frames:
        cycles.append(watcher.cycle())
    reindex_ms = timed(lambda: stream.positions.compact(stream.cache, stream.prefix)) / frames_between_reindexings(stream)
    parts = {name: sum(cycle.ms[name] for cycle in cycles) / seen for name in PARTS} | {"reindex_ms": reindex_ms}
    frame_ms = sum(parts.values())
    rounded: dict[str, Any] = {name: round(ms, 4) for name, ms in parts.items()}
    return {
        "policy": stream.policy.name if policy == AUTO else policy, "budget": stream.budget, "frames": seen,
        "fps": round(1e3 / frame_ms, 3), "frame_ms": round(frame_ms, 4),
        **rounded, **({"vision_ms": None} if has_noise(model) else {}),
        "compress_fraction": round(parts["compress_ms"] / frame_ms, 6),
        **_ends([cycle.frame_ms for cycle in cycles], "frame"),
        **_ends([cycle.compress_fraction for cycle in cycles], "fraction"),
        "cold_frame_ms": round(cold.frame_ms, 4),
    }  # fmt: skip


def predicted_fps(model: Model, budget: int, threads: int) -> float | None:
    """Frames a second as ``edgevlm plan`` predicts them here; None where features are noise, so that a frame has no tower."""
    if has_noise(model):
        return None
    planned = plan_bundle(str(model.bundle.path))
    roofline = Roofline(planned, this_cpu(Machine(), threads), planned.precision, planned.kv)
    return round(speed_of(roofline, budget, CHUNK).prefill_fps, 3)


def _ends(values: Sequence[float], name: str) -> dict[str, float]:
    """The quartiles ``name_low`` and ``name_high``."""
    found = spread(values, "median", f"{name}_low", f"{name}_high", digits=6)
    return {end: found[end] for end in (f"{name}_low", f"{name}_high")}


def open_stream(model: Model, policy: str, budget: int | None) -> Stream:
    """The stream of a session with these settings."""
    named = create_policy(FALLBACK if policy == AUTO else policy)
    prefix, text = model.encode(Chat(model.bundle.chat).prefix), TextBudget.fitting(model.bundle.limit).rows(model)
    tokens = budget or default_budget(model, named, model.bundle.limit - len(prefix) - text)
    chosen = chosen_policy(model.bundle, tokens)[0] if policy == AUTO else named
    return Stream(model, chosen, tokens, prefix, text, "lazy")


@dataclass(frozen=True, slots=True)
class Cycle:
    """From one compression to the next: frames, and milliseconds of each of PARTS."""

    frames: int
    ms: dict[str, float]

    @property
    def frame_ms(self) -> float:
        """A frame, without re-indexing."""
        return sum(self.ms.values()) / self.frames

    @property
    def compress_fraction(self) -> float:
        return self.ms["compress_ms"] / self.frames / self.frame_ms


class DemoStream:
    """Watches the demo world with a stream."""

    def __init__(self, model: Model, stream: Stream) -> None:
        self._model, self._stream, self._world = model, stream, World(0)
        self._preprocess = Preprocessor(model.bundle.vision)

    def cycle(self) -> Cycle:
        """Watch chunks up to one that compresses."""
        self._stream.stats, frames, vision_ms = MemoryStats(), 0, 0.0
        while not self._stream.stats.compressions:
            vision_ms += self.chunk()
            frames += CHUNK
        ms = {name: getattr(self._stream.stats, name) for name in PARTS[1:]}
        return Cycle(frames, {"vision_ms": 0.0 if has_noise(self._model) else vision_ms, **ms})

    def chunk(self) -> float:
        """Watch one chunk; the vision tower's milliseconds."""
        pixels = np.stack([self._preprocess(self._world.step()) for _ in range(CHUNK)])
        started = time.perf_counter()
        features = self._model.engine.encode(pixels)
        took = 1e3 * (time.perf_counter() - started)
        self._stream.append_frames(features)
        return took


def frames_between_reindexings(stream: Stream) -> float:
    """Just after one: how many frames it is to the next, at least one."""
    positions = stream.positions
    free = positions.limit - positions.margin - positions.next
    return max(1.0, free / stream.policy.shape.tokens_per_frame)

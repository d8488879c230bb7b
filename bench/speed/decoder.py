"""Time decode and prefill in edgevlm and in other runtimes with the same weights."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgevlm.bench.seeded import TextModel, open_text_model
from edgevlm.bench.speed.runtimes import OURS, RUNTIMES, Runtime
from edgevlm.bench.timing import Job, Took, figures, ratio, take_turns
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.precisions import load_precision
from edgevlm.progress import show, to_stderr
from edgevlm.runtime.kv import DTYPES

TOKENS_PER_FRAME = {"demo": 16}  # every other model has 196 tokens per frame
Place = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Append:
    """A decoder call to time. ``rows``: the number of rows to decode. ``held``: rows already in the cache. ``frames``: how many
    frames ``rows`` contains.
    """

    held: int
    rows: int = 1
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """One runtime's timings of a call, with one weight precision and one KV precision."""

    runtime: str
    precision: str
    kv: str
    work: Append
    took: Sequence[Took]

    @property
    def median(self) -> float:
        return statistics.median(took.wall for took in self.took)

    def about(self, place: Place) -> Place:
        work, is_prefill = self.work, place["bench"] == "prefill"
        size = {"held": work.held, "frames": work.frames} if is_prefill else {"context": work.held}
        return {"bench": place["bench"], "runtime": self.runtime, **place, "precision": self.precision, **size, "kv": self.kv}


def decode(
    model: Sequence[str] = ("seeded-135m",),
    against: Sequence[str] = ("llama.cpp", "transformers"),
    held: Sequence[int] = (300, 6000),
    precisions: Sequence[str] = ("fp32", "int8", "int4"),
    kv: Sequence[str] = ("fp32", "fp16"),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 15,
) -> Iterator[Place]:
    """Time the decoding of one token, from its embedding to its logits.

    ``held``: rows already in the cache. Yields a line for each weight precision, KV precision, ``held`` and runtime, followed
    by the ratios to other runtimes. Raises UserError for an unknown runtime or precision, and for more rows than the model has
    positions.
    """
    for name in model:
        text, works = open_text_model(name, layers), [Append(rows) for rows in held]
        place = {"bench": "decode", "model": name, "threads": threads} | ({} if layers is None else {"layers": layers})
        yield from _compared(text, against, precisions, works, rounds, kv, place)


def prefill(
    model: Sequence[str] = ("demo",),
    against: Sequence[str] = ("transformers",),
    held: Sequence[int] = (6000,),
    frames: Sequence[int] = (4, 16),
    tokens_per_frame: int | None = None,
    precisions: Sequence[str] = ("fp32",),
    kv: Sequence[str] = ("fp32",),
    threads: int = 1,
    rounds: int = 3,
) -> Iterator[Place]:
    """Time prefill per frame. Yields lines like those of :func:`decode`.

    ``frames``: frames per call. ``held``: tokens already in the cache.
    """
    for name in model:
        p, text = tokens_per_frame or TOKENS_PER_FRAME.get(name, 196), open_text_model(name)
        works = [Append(rows, count * p, count) for rows in held for count in frames]
        place = {"bench": "prefill", "model": name, "tokens_per_frame": p, "threads": threads}
        yield from _compared(text, against, precisions, works, rounds, kv, place)


def _compared(
    text: TextModel, against: Sequence[str], precisions: Sequence[str], works: Sequence[Append], rounds: int,
    kv: Sequence[str], place: Place,
) -> Iterator[Place]:  # fmt: skip
    known = {"against": [name for name in RUNTIMES if name != OURS], "kv": RUNTIMES[OURS].kv}
    for option, typed in (("against", against), ("kv", kv)):
        if unknown := [name for name in typed if name not in known[option]]:
            raise UserError(f"--{option} {unknown[0]}: choose from {', '.join(known[option])}")
    for precision in precisions:
        load_precision(precision)
    limit, is_decode = text.shape.model_limit - 1, place["bench"] == "decode"
    if over := [work.held for work in works if is_decode and work.held > limit]:
        raise UserError(f"--held {over[0]}: {text.name} supports 1 to {limit}")
    timings = list[Timing]()
    for precision in precisions:
        for timing in measure(text, against, precision, works, place["threads"], rounds, kv):
            timings.append(timing)
            read = {"read_mb": read_mb(text.shape, precision, timing.kv, timing.work.held)} if is_decode else {}
            yield timing.about(place) | figures("token" if is_decode else "frame", timing.took) | read
    for ours, theirs in pairs(timings):
        yield {**ours.about(place), "against": theirs.runtime, "against_kv": theirs.kv, **ratio(ours.took, theirs.took)}


def read_mb(shape: DecoderShape, precision: str, kv: str, held: int) -> float:
    """Return how many MB of weights, keys and values are read to decode a token. ``held``: how many tokens the cache holds."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    matrices = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    layouts = load_precision(precision).onnxruntime
    table = shape.vocab * shape.hidden * layouts.table.bytes_per_weight()
    weights = matrices * layouts.matrices.bytes_per_weight() + table
    return round((weights + shape.layers * 2 * shape.kv_size * DTYPES[kv].itemsize * held) / 1e6, 1)


def measure(
    model: TextModel, against: Sequence[str], precision: str, works: Sequence[Append], threads: int, rounds: int,
    kinds: Sequence[str] = ("fp32",),
) -> Iterator[Timing]:  # fmt: skip
    """Time our decoder and other runtimes on the same weights.

    ``against``: the other runtimes. ``kinds``: KV cache types. All runtimes are loaded together and take turns. Work
    with the fewest held rows comes first. Skipped runtimes are reported.
    """
    capacity = max(work.held + work.rows for work in works)
    with ExitStack() as stack:
        runtimes: dict[tuple[str, str], Runtime] = {}
        for name in (OURS, *against):
            if why := RUNTIMES[name].lacks(precision):
                to_stderr(f"skipping {name}: {why}")
                continue
            for kv in (kind for kind in kinds if kind in RUNTIMES[name].kv):
                show(f"{name}: loading {model.name}, {precision} weights, {kv} KV cache")
                runtimes[name, kv] = RUNTIMES[name].start(model, precision, threads, capacity, kv)
                stack.callback(runtimes[name, kv].close)
        for work in sorted(works, key=lambda work: (work.held, work.rows)):
            for (name, kv), runtime in runtimes.items():
                show(f"{name}: filling {work.held:,} rows of {kv}")
                runtime.hold(work.held)
            show(f"{model.name}, {precision}: timing {work.rows} rows after {work.held:,}")
            ids, scores = [0] * work.rows, work.rows == 1
            jobs = {key: Job(partial(one.append, ids, scores), work.frames, one.forget) for key, one in runtimes.items()}
            took = take_turns(jobs, rounds)
            yield from (Timing(name, precision, kv, work, took[name, kv]) for name, kv in runtimes)


def pairs(timings: Sequence[Timing]) -> Iterator[tuple[Timing, Timing]]:
    """Pair our timing with every other runtime's for each KV precision, and our fastest with that runtime's fastest."""
    for precision, work in dict.fromkeys((timing.precision, timing.work) for timing in timings):
        rounds = [timing for timing in timings if (timing.precision, timing.work) == (precision, work)]
        ours = {timing.kv: timing for timing in rounds if timing.runtime == OURS}
        for name in dict.fromkeys(timing.runtime for timing in rounds if timing.runtime != OURS):
            theirs = {timing.kv: timing for timing in rounds if timing.runtime == name}
            yield from ((ours[kv], other) for kv, other in theirs.items() if kv in ours)
            one, other = (min(kinds.values(), key=lambda timing: timing.median) for kinds in (ours, theirs))
            if one.kv != other.kv:
                yield one, other

"""A vision tower at its real size, in fp32 and int8, one frame at a time or several, beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch

from edgevlm.bench.rounds import Job, figures, in_turn, ratio
from edgevlm.bench.towers import TOWERS, Float32, Tower, engine_of, reference, traceable
from edgevlm.errors import UserError, nearest
from edgevlm.export.vision import check_precision
from edgevlm.runtime.bundle import Progress

OURS, OTHER = "edgevlm", "transformers"
Encode = Callable[[Float32], Any]


def vision(
    *,
    towers: Sequence[str] = tuple(TOWERS),
    precisions: Sequence[str] = ("fp32", "int8"),
    batches: Sequence[int] = (1, 4),
    against: Sequence[str] = (),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 3,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Lines of each tower: a frame's milliseconds by precision and batch, then ratios to transformers, then int8's error.

    Frames and weights are random; layers: the first so many alone. ``working_mb``: what the process grew by in a runtime's
    first call of that batch. int8's features are compared with fp32's on the same frames: cosine of all numbers, and the
    largest difference over the root mean square. Raises UserError for a tower, precision or runtime that is not known.
    """
    if unknown := [name for name in towers if name not in TOWERS]:
        raise UserError(f"--tower {unknown[0]!r} is not known; {nearest(unknown[0], TOWERS)}")
    for name in precisions:
        check_precision(name)
    if set(against) - {OTHER}:
        raise UserError(f"--against {', '.join(against)}: there is {OTHER}")
    torch.set_num_threads(threads)
    for name in towers:
        tower = TOWERS[name].shortened(layers)
        place = {"bench": "vision", "tower": name, "layers": tower.vision[tower.depth], "threads": threads}
        with ExitStack() as stack, torch.inference_mode():
            encoders = _encoders(tower, precisions, bool(against), threads, stack, partial(_named, progress, name))
            for batch in batches:
                yield from _measured(encoders, _frames(tower, batch), rounds, {**place, "batch": batch})
            if {("fp32"), ("int8")} <= set(precisions):
                frames = _frames(tower, 2)
                features = [encoders[OURS, precision](frames) for precision in ("fp32", "int8")]
                yield {**place, "runtime": OURS, "precision": "int8", **error(*features)}


def _named(progress: Progress, name: str, what: str) -> None:
    progress(f"{name}: {what}")


def _encoders(
    tower: Tower, precisions: Sequence[str], beside: bool, threads: int, stack: ExitStack, progress: Progress
) -> dict[tuple[str, str], Encode]:
    """Runtime and precision -> what encodes frames."""
    encoders: dict[tuple[str, str], Encode] = {}
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="edgevlm-bench-")))
    module = traceable(tower, folder)
    for precision in precisions:
        progress(f"tracing {precision}")
        place = folder / precision
        place.mkdir()
        engine = engine_of(module, place, precision, threads)
        stack.callback(engine.close)
        encoders[OURS, precision] = engine.encode
    if beside:
        encoders[OTHER, "fp32"] = reference(tower, module)
    return encoders


def _measured(
    encoders: dict[tuple[str, str], Encode], frames: Float32, rounds: int, place: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    working = {key: _grows(partial(encode, frames)) for key, encode in encoders.items()}
    took = in_turn({key: Job(partial(encode, frames), len(frames)) for key, encode in encoders.items()}, rounds)
    for (runtime, precision), times in took.items():
        grown = {"working_mb": round(working[runtime, precision] / 1e6)}
        yield {**place, "runtime": runtime, "precision": precision, **figures("frame", times), **grown}
    for (runtime, precision), times in took.items():
        if runtime == OURS and (OTHER, "fp32") in took:
            compared = {"runtime": runtime, "precision": precision, "against": OTHER}
            yield {**place, **compared, **ratio(times, took[OTHER, "fp32"])}


def _grows(run: Callable[[], object]) -> int:
    process = psutil.Process()
    before = process.memory_info().rss
    run()
    return int(process.memory_info().rss - before)


def _frames(tower: Tower, count: int) -> Float32:
    return np.random.default_rng(0).standard_normal((count, 3, tower.side, tower.side), np.float32)


def error(exact: Float32, rounded: Float32) -> dict[str, float]:
    """Cosine of all features, and their largest difference over the root mean square of the exact ones."""
    cosine = float(np.vdot(exact, rounded) / (np.linalg.norm(exact) * np.linalg.norm(rounded)))
    largest = float(np.abs(exact - rounded).max() / np.sqrt(np.mean(exact**2)))
    return {"cosine": round(cosine, 6), "max_error": round(largest, 4)}

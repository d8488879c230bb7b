"""Frames into a memory that is full already, beside other runtimes with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgevlm.bench.rounds import figures, ratio
from edgevlm.bench.runtimes import check_runtimes
from edgevlm.bench.runtimes.measure import Result, Work, compared, measure
from edgevlm.bench.runtimes.text_model import open_text_model
from edgevlm.runtime.bundle import Progress

TOKENS_PER_FRAME = {"seeded-0.5b": 196, "demo": 16}
MODELS = tuple(TOKENS_PER_FRAME)


def prefill(
    *,
    models: Sequence[str] = MODELS,
    against: Sequence[str] = (),
    held: int = 6000,
    chunks: Sequence[int] = (4, 16),
    tokens_per_frame: int | None = None,
    threads: int = 1,
    rounds: int = 3,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each model, chunk and runtime: the milliseconds of a frame in a chunk of as many, after ``held`` tokens.

    models: see :func:`open_text_model`. tokens_per_frame: TOKENS_PER_FRAME by default, 196 for others. Weights, keys and values
    are float32, and no logits are computed. Lines with the ratios of ours come at the end. Raises UserError for a runtime that
    is not known.
    """
    check_runtimes(against)
    results: dict[tuple[str, int], list[Result]] = {}
    for name in models:
        p = tokens_per_frame or TOKENS_PER_FRAME.get(name, 196)
        works = [Work(held, frames * p, frames) for frames in chunks]
        for result in measure(open_text_model(name), against, "fp32", works, threads, rounds, progress):
            results.setdefault((name, p), []).append(result)
            yield {**_place(name, p, result, threads), **figures("frame", result.took)}
    for (name, p), measured in results.items():
        for ours, other in compared(measured):
            yield {**_place(name, p, ours, threads), "against": other.runtime, **ratio(ours.took, other.took)}


def _place(model: str, tokens_per_frame: int, result: Result, threads: int) -> dict[str, Any]:
    work = {"held": result.work.held, "frames": result.work.frames, "tokens_per_frame": tokens_per_frame, "threads": threads}
    return {"bench": "prefill", "runtime": result.runtime, "model": model, "precision": result.precision, **work}

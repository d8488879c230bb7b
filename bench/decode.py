"""One token at a time, beside other runtimes with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgevlm.bench.rounds import figures, ratio
from edgevlm.bench.runtimes import OURS, check_runtimes
from edgevlm.bench.runtimes.measure import Result, Work, measure
from edgevlm.bench.runtimes.text_model import open_text_model
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.bundle import Progress

DEFAULT_MODEL = "seeded-135m"


def decode(
    *,
    model: str = DEFAULT_MODEL,
    against: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32", "int8", "int4"),
    contexts: Sequence[int] = (300, 6000),
    threads: int = 1,
    rounds: int = 15,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each precision, context and runtime: the milliseconds of a token; at the end one for each ratio of ours.

    model: see :func:`open_text_model`. A token is looked up, decoded after ``context`` rows, and its logits are there; keys and
    values are float32 in all runtimes. Raises UserError for a runtime or precision that is not known and for a context that
    the model has no positions for.
    """
    check_runtimes(against)
    for precision in precisions:
        load_precision(precision)
    text = open_text_model(model)
    limit = text.shape.model_limit - 1
    if over := [context for context in contexts if not 1 <= context <= limit]:
        raise UserError(f"--context {over[0]}: {text.name} has room for 1 to {limit}")
    works, results = [Work(held=context) for context in contexts], list[Result]()
    for precision in precisions:
        for result in measure(text, against, precision, works, threads, rounds, progress):
            results.append(result)
            yield {**_place(result, threads), **figures("token", result.took)}
    for result in results:
        if result.runtime != OURS:
            yield {**_place(result, threads), "runtime": OURS, "against": result.runtime, **ratio(result.ours, result.took)}


def _place(result: Result, threads: int) -> dict[str, Any]:
    work = {"precision": result.precision, "context": result.work.held, "threads": threads}
    return {"bench": "decode", "runtime": result.runtime, **work}

"""One token at a time, beside other runtimes with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgevlm.bench.rounds import figures, ratio
from edgevlm.bench.runtimes import OURS, RUNTIMES, check_runtimes
from edgevlm.bench.runtimes.measure import Result, Work, compared, measure
from edgevlm.bench.runtimes.text_model import open_text_model
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.kv import DTYPES

DEFAULT_MODEL = "seeded-135m"


def decode(
    *,
    model: str = DEFAULT_MODEL,
    against: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32", "int8", "int4"),
    contexts: Sequence[int] = (300, 6000),
    kinds: Sequence[str] = ("fp32", "fp16"),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 15,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for each precision of weights and of memory, context and runtime: a token's milliseconds; then ratios of ours.

    model, layers: see :func:`open_text_model`. A token is looked up, decoded after ``context`` rows, and its logits are there.
    kinds: of keys and values. Ratios: see :func:`compared`. Raises UserError for a runtime or precision that is not known
    and for a context that the model has no positions for.
    """
    check_runtimes(against)
    for precision in precisions:
        load_precision(precision)
    if other := [kv for kv in kinds if kv not in RUNTIMES[OURS][3]]:
        raise UserError(f"--kv {other[0]}: there is {', '.join(RUNTIMES[OURS][3])}")
    text = open_text_model(model, layers)
    limit = text.shape.model_limit - 1
    if over := [context for context in contexts if not 1 <= context <= limit]:
        raise UserError(f"--context {over[0]}: {text.name} has room for 1 to {limit}")
    works, results = [Work(held=context) for context in contexts], list[Result]()
    for precision in precisions:
        for result in measure(text, against, precision, works, threads, rounds, progress, kinds):
            results.append(result)
            read = {"read_mb": read_mb(text.shape, result.precision, result.kv, result.work.held)}
            yield {**_place(model, layers, result, threads), **figures("token", result.took), **read}
    for ours, theirs in compared(results):
        beside = {"against": theirs.runtime, "against_kv": theirs.kv}
        yield {**_place(model, layers, ours, threads), **beside, **ratio(ours.took, theirs.took)}


def read_mb(shape: DecoderShape, precision: str, kv: str, held: int) -> float:
    """MB that one token reads: the matrices of all layers, the head, and the keys and values of ``held`` tokens."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    matrices = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    layouts = load_precision(precision).onnxruntime
    table = shape.vocab * shape.hidden * layouts.table.bytes_per_weight()
    weights = matrices * layouts.matrices.bytes_per_weight() + table
    return round((weights + shape.layers * 2 * shape.kv_size * DTYPES[kv].itemsize * held) / 1e6, 1)


def _place(model: str, layers: int | None, result: Result, threads: int) -> dict[str, Any]:
    cut = {} if layers is None else {"layers": layers}
    work = {**cut, "precision": result.precision, "context": result.work.held, "threads": threads, "kv": result.kv}
    return {"bench": "decode", "runtime": result.runtime, "model": model, **work}

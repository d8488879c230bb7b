"""Two ways through the same decoder, in pairs: per-layer graphs and PureKV's ST-SpAttn graph, each beside the full graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgevlm.bench.models import SEEDED, TOKENS_PER_FRAME, open_model
from edgevlm.bench.noise import noise_buffers
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Engine, FramePattern, load_engine
from edgevlm.runtime.positions import rope_tables

ANSWER = 16  # steps of one row that are timed together
PREFIX = 16  # rows before the vision tokens

Step = Callable[[], object]


def per_layer(
    model: Sequence[str] = ("demo",),
    held: Sequence[int] = (300, 6000),
    precisions: Sequence[str] = ("fp32",),
    threads: int | None = None,
    rounds: int = 30,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Time a step through per-layer graphs beside the full graph, for one row with its logits and for a frame's rows.

    The cache holds ``held`` rows of noise in every layer and KV head. ``ratio``: per-layer over full, round by round;
    ``precisions`` are of the seeded model's weights. Raises UserError for a cache that does not fit and for a bundle without
    per-layer graphs.
    """
    count = threads or default_threads()
    for name in model:
        for precision in precisions if name == SEEDED else ["own"]:
            with open_model(name, count, progress, precision) as loaded:
                bundle, engine, spec = loaded.bundle, loaded.engine, loaded.bundle.decoder
                place = {"bench": "per-layer", "model": name, "layers": spec.layers, "hidden": spec.hidden}
                place |= {"precision": spec.precision, "kv": spec.kv}
                for size, rows in ((size, rows) for size in held for rows in (1, bundle.vision.tokens_per_frame)):
                    progress(f"{name}: {size:,} rows held, {rows} new")
                    steps, repeat = _full_and_per_layer(bundle, engine, size, rows), ANSWER if rows == 1 else 1
                    took = take_turns({key: Job(_repeated(step, repeat), repeat) for key, step in steps.items()}, rounds)
                    times = {f"{key}_ms": figures("step", each)["ms_per_step"] for key, each in took.items()}
                    compared = ratio(took["per_layer"], took["full"])
                    yield {**place, "held": size, "rows": rows, **times, **compared, "threads": count}


def _repeated(step: Step, count: int) -> Step:
    return lambda: [step() for _ in range(count)]


def _full_and_per_layer(bundle: Bundle, engine: Engine, held: int, rows: int) -> dict[str, Step]:
    """A step through the full graph and the same through the per-layer graphs; the next one writes the same rows again."""
    spec, random = bundle.decoder, np.random.default_rng(0)
    buffers = noise_buffers(spec.layers, spec.kv_heads, held + rows, spec.head_dim, spec.kv)
    embeds = random.standard_normal((rows, spec.row_width), np.float32)
    tables = rope_tables(np.arange(held, held + rows, dtype=np.int32), bundle.inv_freq)
    wanted = (-1,) if rows == 1 else ()
    by_layer, by_head = np.full(spec.layers, held, np.int32), np.full(spec.kv_heads, held, np.int32)
    full, layers = engine.bind(buffers), engine.bind_layers(buffers)

    def through_layers() -> None:
        layers.begin(embeds, *tables, wanted)
        for layer in range(spec.layers):
            layers.attend(layer, by_head)
        layers.logits()

    return {"full": lambda: full.step(embeds, *tables, by_layer, wanted), "per_layer": through_layers}


def st_spattn(
    held: Sequence[int] = (6144, 24576),
    frames: Sequence[int] = (1,),
    layers: int = 8,
    threads: int | None = None,
    rounds: int = 5,
    *,
    shape: Any = None,
    tokens_per_frame: int = TOKENS_PER_FRAME,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Time a frame's prefill through PureKV's ST-SpAttn graph beside dense prefill; weights are random.

    A line for each number of vision tokens held: median milliseconds of a call of ``frames`` frames, and ``ratio``, dense over
    sparse. ``shape``: by default the first layers of LLaVA-OneVision-0.5B. Raises UserError for a ``held`` of no more than a
    frame and of more than fits in memory.
    """
    seeded = needed("edgevlm.bench.seeded", "a model of random weights")
    decoder = needed("edgevlm.export.decoder", "a model of random weights")
    from dataclasses import replace

    shape = shape or replace(seeded.SHAPES[SEEDED][1], layers=layers, model_limit=1 << 20)
    start = decoder.first_sparse_layer(shape, None)
    if small := [rows for rows in held if rows <= tokens_per_frame]:
        raise UserError(f"--held {small[0]} is no more than a frame; give {tokens_per_frame + 1} or more")
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        progress("writing random weights")
        bundle = seeded.decoder_bundle(Path(folder), shape, tokens_per_frame, st_spattn_from=start)
        engine = load_engine("onnxruntime-cpu", bundle, threads=threads)
        for rows, count in ((rows, count) for rows in held for count in frames):
            progress(f"{rows:,} tokens held, {count} frames a call")
            took = take_turns({key: Job(step) for key, step in _dense_and_sparse(engine, bundle, rows, count).items()}, rounds)
            dense, sparse = ([once.wall for once in took[key]] for key in ("dense", "st_spattn"))
            yield {
                "bench": "prefill-pattern", "held": rows, "frames": count, "tokens_per_frame": tokens_per_frame,
                "layers": shape.layers, "st_spattn_from": start, "hidden": shape.hidden, "heads": shape.heads,
                "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "threads": threads,
                "dense_ms": round(statistics.median(dense), 1), "st_spattn_ms": round(statistics.median(sparse), 1),
                "ratio": round(statistics.median(one / other for one, other in zip(dense, sparse, strict=True)), 2),
            }  # fmt: skip
        engine.close()


def _dense_and_sparse(engine: Engine, bundle: Bundle, held: int, frames: int) -> dict[str, Step]:
    """A dense and a sparse append of the same rows after ``held`` random ones."""
    d, p = bundle.decoder, bundle.vision.tokens_per_frame
    past, count, rng = PREFIX + held, frames * p, np.random.default_rng(0)
    buffers = noise_buffers(d.layers, d.kv_heads, past + count, d.head_dim, "fp32")
    pattern = FramePattern(PREFIX + p, rng.integers(PREFIX + p, past, (d.layers, d.kv_heads, p)))
    rows = rng.standard_normal((count, d.hidden), np.float32)
    tables = rope_tables(np.arange(past, past + count, dtype=np.int32), bundle.inv_freq)
    lengths = np.full(d.layers, past, np.int32)
    dense, sparse = engine.bind(buffers), engine.bind(buffers, variant="st-spattn")
    return {
        "dense": lambda: dense.step(rows, *tables, lengths, ()),
        "st_spattn": lambda: sparse.step(rows, *tables, lengths, (), pattern),
    }

"""Prefill of frames through PureKV's ST-SpAttn graph against dense prefill, at several sizes of the memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from edgevlm.bench.seeded import seeded_bundle
from edgevlm.bench.timing import timed
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.decoder import first_sparse_layer
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Engine, FramePattern, KVBuffer, load_engine
from edgevlm.runtime.positions import rope_tables

PREFIX = 16
HELD = (6144, 24576)


def prefill_pattern(
    *,
    held: Sequence[int] = HELD,
    frames: int = 1,
    tokens_per_frame: int = 196,
    layers: int = 8,
    hidden: int = 896,
    heads: int = 14,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int = 4864,
    st_spattn_from: int | None = None,
    repeats: int = 5,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One line for each number of vision tokens ``held`` per layer: median milliseconds of a call of ``frames`` frames.

    Both graphs append to the same buffers, in turn; ``ratio`` is the median over these pairs, dense over sparse. The weights
    are random and the shape is one's own; the default is eight layers of LLaVA-OneVision-0.5B. Raises UserError for a ``held``
    of no more than a frame or of more than fits in free memory.
    """
    shape = DecoderShape(
        layers, heads, kv_heads, head_dim, hidden, intermediate, vocab=1024, norm_eps=1e-6, rope_theta=1e6,
        model_limit=1 << 20, tied=True,
    )  # fmt: skip
    start = first_sparse_layer(shape, st_spattn_from)
    for rows in held:
        _check(rows, frames * tokens_per_frame, tokens_per_frame, shape)
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        bundle = seeded_bundle(Path(folder), shape, tokens_per_frame, st_spattn_from=start)
        engine = load_engine("onnxruntime-cpu", bundle, threads=threads)
        for rows in held:
            pairs = _pairs(*_calls(engine, bundle, rows, frames), repeats)
            dense, sparse = (statistics.median(times) for times in zip(*pairs, strict=True))
            yield {
                "bench": "prefill-pattern",
                "held": rows,
                "frames": frames,
                "tokens_per_frame": tokens_per_frame,
                "layers": layers,
                "st_spattn_from": start,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "threads": threads,
                "dense_ms": round(dense, 1),
                "st_spattn_ms": round(sparse, 1),
                "ratio": round(statistics.median(one / other for one, other in pairs), 2),
            }
        engine.close()


def _calls(engine: Engine, bundle: Bundle, held: int, frames: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A dense and a sparse append of the same rows after ``held`` random ones."""
    d, p = bundle.decoder, bundle.vision.tokens_per_frame
    past, count = PREFIX + held, frames * p
    rng = np.random.default_rng(0)
    shape = (1, d.kv_heads, past + count, d.head_dim)
    memory = [[rng.standard_normal(shape, np.float32) for _ in range(2)] for _ in range(d.layers)]
    buffers = [KVBuffer(k.ctypes.data, v.ctypes.data, shape, k.dtype, (k, v)) for k, v in memory]
    previous = rng.integers(PREFIX + p, past, (d.layers, d.kv_heads, p))
    pattern = FramePattern(PREFIX + p, previous)
    rows = rng.standard_normal((count, d.hidden), np.float32)
    tables = rope_tables(np.arange(past, past + count, dtype=np.int32), bundle.inv_freq)
    lengths = np.full(d.layers, past, np.int32)
    whole, sparse = engine.bind(buffers), engine.bind(buffers, variant="st-spattn")
    return (
        lambda: whole.step(rows, *tables, lengths, ()),
        lambda: sparse.step(rows, *tables, lengths, (), pattern),
    )


def _pairs(dense: Callable[[], object], sparse: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Milliseconds of both, in turn, after one round that does not count."""
    return [(timed(dense), timed(sparse)) for _ in range(repeats + 1)][1:]


def _check(held: int, rows: int, tokens_per_frame: int, shape: DecoderShape) -> None:
    if held <= tokens_per_frame:
        raise UserError(f"--held {held} is no more than a frame; give {tokens_per_frame + 1} or more")
    wanted, free = 8 * shape.layers * shape.kv_size * (PREFIX + held + rows), psutil.virtual_memory().available
    if wanted > free:
        raise UserError(
            f"{held + rows:,} tokens take {wanted / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; lower --held or --frames"
        )

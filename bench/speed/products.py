"""Time matrix products with a layer's weights in each storage format, compared with float32 and with a plain read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto

from edgevlm.bench.seeded import SHAPES
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.engines.onnxruntime_cpu import session_options
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.precisions import Layout, Stored
from edgevlm.export.precisions.layouts import Blocks, Dense, RowsByColumns
from edgevlm.progress import show
from edgevlm.runtime import kernels

PLAIN, READ, BLOCKS, OURS = "fp32", "read", "int4 blocks", "int4 extension"
LAYOUTS: dict[str, Layout] = {
    PLAIN: Dense(),
    "int8 blocks": Blocks(8),
    BLOCKS: Blocks(4),
    "int8 columns": RowsByColumns(),
}


def products(
    model: Sequence[str] = ("seeded-0.5b",),
    frames: Sequence[int] = (0, 1, 2),
    tokens_per_frame: int = 196,
    threads: int = 1,
    rounds: int = 11,
) -> Iterator[dict[str, Any]]:
    """Time each matrix of a random layer, and the whole layer, with one row or with all rows of whole frames.

    ``frames``: frames per call; 0 means one row. ``ratio``: the time divided by float32's time. ``gflop_s`` counts two
    operations per weight and row. ``gb_s`` counts each stored byte once. ``read``: the time of numpy's ``max`` over the float32
    matrix. ``int4 extension``: the time of the whole layer in the C++ extension. Raises UserError for an unknown shape.
    """
    for name in model:
        if name not in SHAPES:
            raise UserError(f"--model {name}: choose from {', '.join(SHAPES)}")
        shape = SHAPES[name][1]
        matrices = {
            "qkv": (shape.heads * shape.head_dim + 2 * shape.kv_size, shape.hidden),
            "output": (shape.hidden, shape.heads * shape.head_dim),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        weights = {
            matrix: np.random.default_rng(0).standard_normal(size, np.float32) / np.float32(np.sqrt(size[1]))
            for matrix, size in matrices.items()
        }
        for matrix, chosen in {**{key: [weight] for key, weight in weights.items()}, "layer": [*weights.values()]}.items():
            for rows in (count * tokens_per_frame or 1 for count in frames):
                show(f"{name}: {rows} rows of {matrix}")
                jobs = {key: _products(layout, chosen, rows, threads) for key, layout in LAYOUTS.items()}
                if matrix == "layer" and kernels.multiplies_codes():
                    jobs[OURS] = _layer(shape, [weights[key] for key in ("output", "gate_up", "down", "qkv")], rows, threads)
                jobs[READ] = partial(_read, chosen)
                place = {"bench": "products", "model": name, "matrix": matrix, "rows": rows, "threads": threads}
                yield from _measured(place, jobs, sum(weight.size for weight in chosen), rounds)


def _measured(place: dict[str, Any], jobs: dict[str, Callable[[], object]], size: int, rounds: int) -> Iterator[dict[str, Any]]:
    took = take_turns({name: Job(job) for name, job in jobs.items()}, rounds)
    for name, times in took.items():
        ms = median(once.wall for once in times)
        stored = size * (4 if name == READ else LAYOUTS.get(name, LAYOUTS[BLOCKS]).bytes_per_weight())
        speeds = {"gb_s": round(stored / ms / 1e6, 1)}
        if name != READ:
            speeds["gflop_s"] = round(2 * size * place["rows"] / ms / 1e6, 1)
        yield {**place, "layout": name, **figures("product", times), **speeds}
    for name in took:
        if name not in (PLAIN, READ):
            yield {**place, "layout": name, "against": PLAIN, **ratio(took[name], took[PLAIN])}
    if OURS in took:
        yield {**place, "layout": OURS, "against": BLOCKS, **ratio(took[OURS], took[BLOCKS])}


def _read(weights: Sequence[np.ndarray]) -> None:
    for weight in weights:
        weight.max()


def _layer(shape: DecoderShape, weights: Sequence[np.ndarray], rows: int, threads: int) -> Callable[[], object]:
    """Return a function that runs a layer without its attention in the C++ extension."""
    parts, none = [LAYOUTS[BLOCKS].parts(weight) for weight in weights], [None] * 4
    codes, scales = ([part[name] for part in parts] for name in ("codes", "scales"))
    part = kernels.RowPart(codes, scales, none, none, shape.norm_eps, shape.kv_heads, shape.head_dim, 1)
    widths = (shape.heads * shape.head_dim, shape.hidden, shape.head_dim // 2, shape.head_dim // 2)
    given: list[Any] = [np.random.default_rng(1).standard_normal((rows, width), np.float32) for width in widths]
    given += [np.zeros((rows, width), np.float32) for width in (widths[0], shape.kv_size, shape.kv_size, shape.hidden)]
    return partial(part.run, *[*given, threads])


def _products(layout: Layout, weights: Sequence[np.ndarray], rows: int, threads: int) -> Callable[[], object]:
    calls = [_product(layout, weight, rows, threads) for weight in weights]
    return lambda: [call() for call in calls]


def _product(layout: Layout, weight: np.ndarray, rows: int, threads: int) -> Callable[[], object]:
    """Return a function that multiplies ``rows`` rows of noise by the stored matrix ``[out, in]``."""
    out, width = weight.shape
    with TemporaryDirectory(prefix="edgevlm-bench-") as place:
        folder = Path(place)
        with (folder / "weights").open("wb") as stream:
            graph = GraphBuilder("product", WeightsFile(stream, "weights"))
            graph.for_cpu = True
            graph.input("x", TensorProto.FLOAT, [1, "S", width])
            graph.output(Stored.of(layout, weight).multiply(graph, "y", "x"), TensorProto.FLOAT, [1, "S", out])
        graph.save(folder / "product.onnx")
        file, options = str(folder / "product.onnx"), session_options(threads)
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((1, rows, width), np.float32)
    return lambda: session.run(None, {"x": x})

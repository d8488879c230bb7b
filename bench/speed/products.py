"""Products with a layer's matrices as each layout stores them, beside float32's and a plain read of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.precisions import Layout, Stored
from edgevlm.export.precisions.layouts import Blocks, Dense, RowsByColumns
from edgevlm.progress import show

PLAIN, READ = "fp32", "read"
LAYOUTS: dict[str, Layout] = {
    PLAIN: Dense(),
    "int8 blocks": Blocks(8),
    "int4 blocks": Blocks(4),
    "int8 columns": RowsByColumns(),
}


def products(
    model: Sequence[str] = ("seeded-0.5b",),
    frames: Sequence[int] = (0, 1, 2),
    tokens_per_frame: int = 196,
    threads: int = 1,
    rounds: int = 11,
) -> Iterator[dict[str, Any]]:
    """Time each matrix of a layer of a model's shape, of noise, with one row or whole frames of rows.

    frames: in a call; 0 is a single row. ``ratio`` is to float32's time; ``gflop_s`` counts two operations a weight and row,
    ``gb_s`` the stored bytes once; ``read`` is numpy's largest number of the float32 matrix. Raises UserError for an unknown
    shape.
    """
    for name in model:
        if name not in SHAPES:
            raise UserError(f"--model {name}: there is {', '.join(SHAPES)}")
        shape = SHAPES[name][1]
        matrices = {
            "qkv": (shape.heads * shape.head_dim + 2 * shape.kv_size, shape.hidden),
            "output": (shape.hidden, shape.heads * shape.head_dim),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        for matrix, size in matrices.items():
            weight = np.random.default_rng(0).standard_normal(size, np.float32) / np.float32(np.sqrt(size[1]))
            for rows in (count * tokens_per_frame or 1 for count in frames):
                show(f"{name}: {rows} rows of {matrix}")
                place = {"bench": "products", "model": name, "matrix": matrix, "rows": rows, "threads": threads}
                yield from _measured(place, weight, rows, threads, rounds)


def _measured(place: dict[str, Any], weight: np.ndarray, rows: int, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    jobs = {name: Job(_product(layout, weight, rows, threads)) for name, layout in LAYOUTS.items()}
    took = take_turns({**jobs, READ: Job(weight.max)}, rounds)
    for name, times in took.items():
        ms = median(once.wall for once in times)
        size = weight.size * (4 if name == READ else LAYOUTS[name].bytes_per_weight())
        speeds = {"gb_s": round(size / ms / 1e6, 1)}
        if name != READ:
            speeds["gflop_s"] = round(2 * weight.size * rows / ms / 1e6, 1)
        yield {**place, "layout": name, **figures("product", times), **speeds}
    for name in LAYOUTS:
        if name != PLAIN:
            yield {**place, "layout": name, "against": PLAIN, **ratio(took[name], took[PLAIN])}


def _product(layout: Layout, weight: np.ndarray, rows: int, threads: int) -> Callable[[], object]:
    """Return a call that multiplies ``rows`` rows of noise by the stored matrix ``[out, in]``."""
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

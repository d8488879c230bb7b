"""Time the attention kernel against ONNX Runtime's GroupQueryAttention and a plain read of the same keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.errors import UserError
from edgevlm.progress import show
from edgevlm.runtime import kernels
from edgevlm.runtime.kv import DTYPES, KV_TYPES

SHAPES = {
    "seeded-0.5b": (24, 14, 2, 64),
    "seeded-135m": (30, 9, 3, 64),
    "seeded-3b": (36, 16, 2, 128),
}  # layers, query heads, KV heads, head_dim
GQA, READ = "GroupQueryAttention", "read"
MOST_MB = 1500  # the keys and values of all timed layers take at most this many MB


def attention(
    model: Sequence[str] = ("seeded-0.5b", "seeded-135m", "seeded-3b"),
    held: Sequence[int] = (300, 6000),
    frames: Sequence[int] = (0, 1),
    tokens_per_frame: int = 196,
    kv: Sequence[str] = KV_TYPES,
    threads: int = 1,
    rounds: int = 5,
) -> Iterator[dict[str, Any]]:
    """Time a model's attention over all its layers, for one new token or for whole frames.

    ``held``: the number of random tokens in the cache. ``frames``: frames per call; 0 means one token. ``ratio``: our time
    divided by GroupQueryAttention's time in fp32. ``gb_s`` counts each key and value once. ``read``: the time of numpy's
    ``max`` over all keys and values. Raises UserError for an unknown shape.
    """
    for name in model:
        if name not in SHAPES:
            raise UserError(f"--model {name}: choose from {', '.join(SHAPES)}")
    if unknown := set(kv) - set(KV_TYPES):
        raise UserError(f"--kv {', '.join(unknown)}: choose from {', '.join(KV_TYPES)}")
    before = kernels.threads()
    kernels.set_threads(threads)
    try:
        for name in model:
            for past in held:
                for rows in (count * tokens_per_frame or 1 for count in frames):
                    show(f"{name}: {rows} tokens after {past}")
                    yield from _measured(name, past, rows, kv, threads, rounds)
    finally:
        kernels.set_threads(before)


def _measured(name: str, held: int, rows: int, kv: Sequence[str], threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    all_layers, heads, kv_heads, dim = SHAPES[name]
    numbers = 2 * kv_heads * (held + rows) * dim
    layers = max(1, min(all_layers, MOST_MB * 1_000_000 // (4 * numbers)))
    rng = np.random.default_rng(0)
    query = rng.standard_normal((rows, heads * dim), np.float32)
    key, value = rng.standard_normal((2, rows, kv_heads * dim), np.float32)
    memory = rng.standard_normal((layers, 2, kv_heads, held + rows, dim), np.float32)
    scales = [np.full((kv_heads, dim), 1 / 32, np.float32)] * 2
    past = np.full(kv_heads, held, np.int32)

    def attend(stored: np.ndarray, *scale: np.ndarray) -> None:
        for layer in stored:
            kernels.attend(query, key, value, layer[0], layer[1], past, *scale)

    runs: dict[str, Callable[[], object]] = {GQA: _gqa(query, key, value, memory, threads), READ: memory.max}
    for precision in kv:
        scale, kind = (scales, DTYPES[precision]) if precision == "int8" else ([], DTYPES[precision])
        runs[precision] = partial(attend, (memory * (32 if scale else 1)).astype(kind), *scale)
    took = take_turns({job: Job(run, rows) for job, run in runs.items()}, rounds)
    place = {"bench": "attention", "model": name, "held": held, "rows": rows, "layers": layers, "threads": threads}
    for job, times in took.items():
        ours = job not in (GQA, READ)
        what = {"runtime": "edgevlm", "kv": job} if ours else {"runtime": job, "kv": "fp32"}
        size = layers * numbers * (DTYPES[job].itemsize if ours else 4)
        speed = size / median(once.wall * rows for once in times) / 1e6
        yield {**place, **what, **figures("token", times), "gb_s": round(speed, 1)}
    for precision in kv:
        compared = {"runtime": "edgevlm", "kv": precision, "against": GQA, **ratio(took[precision], took[GQA])}
        yield {**place, **compared}


def _gqa(query: np.ndarray, key: np.ndarray, value: np.ndarray, memory: np.ndarray, threads: int) -> Callable[[], object]:
    """Return a function that runs ONNX Runtime's GroupQueryAttention in each layer, appending to ``memory`` in place."""
    (rows, width), (_, _, kv_heads, capacity, dim) = query.shape, memory.shape
    part = [1, kv_heads, capacity, dim]
    sizes = {
        "query": [1, rows, width],
        "key": [1, rows, kv_heads * dim],
        "value": [1, rows, kv_heads * dim],
        "keys": part,
        "values": part,
    }
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()]
    inputs.append(helper.make_tensor_value_info("last", TensorProto.INT32, [1, 1]))
    inputs.append(helper.make_tensor_value_info("total", TensorProto.INT32, [1]))
    results = {"out": [1, rows, width], "new_keys": part, "new_values": part}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in results.items()]
    names, heads = [node.name for node in inputs], {"num_heads": width // dim, "kv_num_heads": kv_heads}
    node = helper.make_node(GQA, names, list(results), domain="com.microsoft", **heads)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], GQA, inputs, outputs), opset_imports=imports, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # otherwise ONNX Runtime's threads spin on our cores
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = [query[None], key[None], value[None], np.array([[capacity - 1]], np.int32), np.array([capacity], np.int32)]
    out, bindings = np.empty((1, rows, width), np.float32), []
    for layer in memory:
        binding = session.io_binding()
        for name, array in zip(names, [*given[:3], layer[:1], layer[1:], *given[3:]], strict=True):
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in zip(results, (out, layer[:1], layer[1:]), strict=True):
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        bindings.append(binding)

    def run(_: object = (given, out, memory)) -> None:
        for binding in bindings:
            session.run_with_iobinding(binding)

    return run

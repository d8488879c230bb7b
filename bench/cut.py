"""What it costs a step to go through the cut decoder: the whole graph and the cut ones in turn, over the same memory.

The memory holds noise, as many rows in every layer and KV head. A step appends a row and asks for its logits, as an answer's
token does, or a frame's rows and asks for none; the next step writes the same rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from edgevlm.bench.noise import as_stored, noise_scales
from edgevlm.bench.rounds import Job, figures, in_turn, ratio
from edgevlm.bench.share import SEEDED, TOKENS_PER_FRAME
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.runtime.bundle import Bundle, DecoderSpec, Progress
from edgevlm.runtime.engine import Engine, KVBuffer, arrays_of, load_engine
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.model import bundle_folder
from edgevlm.runtime.positions import rope_tables

HELD = (300, 6000)
ROUNDS = 30
ANSWER = 16  # steps of one row that are timed together


def run(
    models: Sequence[str],
    held: Sequence[int],
    rounds: int,
    threads: int | None,
    precision: str,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """A line for each model (``demo``, SEEDED or a bundle's folder), number of rows ``held`` and kind of step.

    precision: of the weights of SEEDED. ``ratio``: the cut one's time over the whole one's, round by round. Raises UserError
    for a memory that does not fit, and for a bundle without cut graphs.
    """
    count = threads or default_threads()
    for name in models:
        with _opened(name, count, precision, progress) as (bundle, engine):
            for size in held:
                for rows in (1, bundle.vision.tokens_per_frame):
                    progress(f"{name}: {size:,} rows held, {rows} new")
                    yield {"bench": "cut", "model": name, **_line(bundle, engine, size, rows, rounds), "threads": count}


def _line(bundle: Bundle, engine: Engine, held: int, rows: int, rounds: int) -> dict[str, Any]:
    count = ANSWER if rows == 1 else 1
    whole, cut = _steps(bundle, engine, held, rows)
    took = in_turn({"whole": Job(lambda: _times(count, whole), count), "cut": Job(lambda: _times(count, cut), count)}, rounds)
    times = {f"{name}_ms": figures("step", each)["ms_per_step"] for name, each in took.items()}
    spec = bundle.decoder
    about = {"layers": spec.layers, "hidden": spec.hidden, "precision": spec.precision, "kv": spec.kv}
    return {**about, "held": held, "rows": rows, **times, **ratio(took["cut"], took["whole"])}


def _times(count: int, work: Callable[[], object]) -> None:
    for _ in range(count):
        work()


def _steps(bundle: Bundle, engine: Engine, held: int, rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step through the whole graph and the same through the cut ones, behind ``held`` rows of noise."""
    spec, random = bundle.decoder, np.random.default_rng(0)
    buffers = memory(spec, held + rows)
    embeds = random.standard_normal((rows, spec.row_width), np.float32)
    tables = rope_tables(np.arange(held, held + rows, dtype=np.int32), bundle.inv_freq)
    wanted = (-1,) if rows == 1 else ()
    by_layer, by_head = np.full(spec.layers, held, np.int32), np.full(spec.kv_heads, held, np.int32)
    whole, cut = engine.bind(buffers), engine.bind_layers(buffers)

    def through_cut() -> None:
        cut.begin(embeds, *tables, wanted)
        for layer in range(spec.layers):
            cut.attend(layer, by_head)
        cut.logits()

    return lambda: whole.step(embeds, *tables, by_layer, wanted), through_cut


def memory(spec: DecoderSpec, rows: int) -> list[KVBuffer]:
    """A buffer of noise for each layer. Raises UserError where it does not fit into free memory."""
    shape, kind = (1, spec.kv_heads, rows, spec.head_dim), DTYPES[spec.kv]
    wanted = 2 * spec.layers * int(np.prod(shape)) * kind.itemsize
    if wanted > (free := psutil.virtual_memory().available):
        raise UserError(f"{rows:,} rows take {wanted / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; lower --held")
    scales = noise_scales(spec.layers, spec.kv_heads, spec.head_dim) if spec.kv == "int8" else None
    random, made = np.random.default_rng(1), []
    for layer in range(spec.layers):
        key, value = np.empty(shape, kind), np.empty(shape, kind)
        of_layer = (None, None) if scales is None else (scales.key[layer], scales.value[layer])
        buffer = KVBuffer(key.ctypes.data, value.ctypes.data, shape, kind, (key, value), *of_layer)
        for part in arrays_of(buffer):
            part[:] = as_stored(random.standard_normal(shape[1:], np.float32), buffer)
        made.append(buffer)
    return made


@contextmanager
def _opened(name: str, threads: int, precision: str, progress: Progress) -> Iterator[tuple[Bundle, Engine]]:
    """A bundle and its engine; the seeded one is written to a folder that goes again."""
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        if name == SEEDED:
            seeded = needed("edgevlm.bench.seeded", "a model of random weights")
            progress(f"{SEEDED}: writing random weights")
            bundle = seeded.seeded_bundle(Path(folder), seeded.llava_onevision_05b(), TOKENS_PER_FRAME, precision=precision)
        else:
            bundle = Bundle.load(bundle_folder(name))
        engine = load_engine("onnxruntime-cpu", bundle, threads=threads)
        try:
            yield bundle, engine
        finally:
            engine.close()

"""List the engines to build for a bundle, one for each graph.

``edgevlm plan`` uses this module, which must therefore not import TensorRT.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edgevlm.engines.onnx_file import external_bytes, with_dimensions
from edgevlm.errors import BundleError, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import Driver

REVISION = 2  # increase this number to have all users rebuild their engines
WORKSPACE = 1 << 30
COPIES = 3.0
RUNTIME = 500_000_000  # bytes of a CUDA context with TensorRT's libraries: like COPIES, an allowance, not measured
Dims = tuple[int, ...]
Calls = Mapping[str, Mapping[str, tuple[Dims, Dims, Dims]]]  # kind of call -> input -> least, usual and largest shape
USUAL_QUESTION = 64

ONE, ROWS, QUESTION = "one-token", "chunk", "question"
DECODER_CALLS = (ONE, ROWS, QUESTION)  # the order of an engine's profiles


def decoder_calls(bundle: Bundle, capacity: int) -> Calls:
    """Return the input shapes of a decoder's three kinds of calls. ``capacity``: the number of rows per layer in the cache.

    A call for a token or a chunk returns logits for one row; a call for a question can return logits for all its rows.
    """
    assert bundle.shapes is not None
    spec, rows, question = bundle.decoder, min(bundle.shapes.rows, capacity), min(bundle.shapes.question, capacity)

    def inputs(sizes: tuple[int, int, int], logits: tuple[int, int, int]) -> dict[str, Any]:
        widths = {"inputs_embeds": spec.row_width, "cos": spec.head_dim // 2, "sin": spec.head_dim // 2}
        found: dict[str, Any] = {name: tuple((1, size, width) for size in sizes) for name, width in widths.items()}
        found |= {"logit_rows": tuple((count,) for count in logits)}
        return found | {f"columns{layer}": ((1,), (capacity,), (capacity,)) for layer in range(spec.layers)}

    return {
        ONE: inputs((1, 1, 1), (1, 1, 1)),
        ROWS: inputs((1, rows, rows), (1, 1, 1)),
        QUESTION: inputs((1, min(USUAL_QUESTION, question), question), (1, 1, question)),
    }


def pieces(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Settings for building engines.

    ``capacity`` is the number of rows per layer in the cache. ``workspace`` is the working memory of a TensorRT layer in bytes.
    With ``force``, existing engines are rebuilt. With ``probes``, the decoder also returns queries, for policies that use
    attention.
    """

    capacity: int
    workspace: int = WORKSPACE
    probes: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class BuildJob:
    """A graph to build an engine from.

    ``model`` is the graph as bytes, with the cache's size filled in. ``path`` is the graph's file; its weights are in the same
    folder. ``weights`` is the size of the weights in bytes. ``dropped`` names outputs that the engine omits.
    """

    graph: str
    model: bytes
    path: str
    calls: Calls
    dropped: frozenset[str]
    weights: int
    fingerprint: str


def jobs_of(bundle: Bundle, settings: BuildSettings) -> list[BuildJob]:
    """Return two jobs, one for the tower and one for the decoder. Raises BundleError if a graph file is invalid."""
    assert bundle.shapes is not None
    vision, layers = bundle.vision, range(bundle.decoder.layers)
    most, frame = max(1, bundle.shapes.frames // vision.group), (3 * vision.group, *vision.size)
    frames = {"frames": {"pixel_values": ((1, *frame), (most, *frame), (most, *frame))}}
    dropped = frozenset() if settings.probes else frozenset(f"query{layer}" for layer in layers)
    rows = {f"C{layer}": settings.capacity for layer in layers}
    return [
        _job(bundle, vision.graph, frames, {}, frozenset()),
        _job(bundle, bundle.decoder.graphs["full"], decoder_calls(bundle, settings.capacity), rows, dropped),
    ]


def _job(bundle: Bundle, name: str, calls: Calls, sizes: dict[str, int], dropped: frozenset[str]) -> BuildJob:
    path = bundle.file(name)
    try:
        model = with_dimensions(path.read_bytes(), sizes)
        files = external_bytes(model)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: {error}; export the checkpoint again") from None
    weights = {file: bundle.files[file].sha256 for file in sorted(files)}
    parts = [REVISION, hashlib.sha256(model).hexdigest(), weights, calls, sorted(dropped)]
    fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return BuildJob(path.stem, model, str(path), calls, dropped, sum(files.values()), fingerprint)


@dataclass(frozen=True, slots=True)
class BuildNeed:
    """The bytes that a build needs in host memory and in device memory."""

    host: int
    device: int


def build_need(weights: int, workspace: int) -> BuildNeed:
    """Return the peak memory for building one engine, from the sizes of the weights and of a layer's workspace in bytes.

    ``host`` is COPIES * weights + RUNTIME: the file's weights, the builder's copy and the finished engine are held at once.
    ``device`` is weights + workspace; TensorRT needs both while it times kernels.
    """
    return BuildNeed(round(COPIES * weights) + RUNTIME, weights + workspace)


def check_memory(name: str, need: BuildNeed, driver: Driver) -> None:
    """Raise UserError, with advice, if there is too little free memory to build an engine. ``name``: its graph.

    On a Jetson, host and device share memory. Swap space can provide ``need.host``, but not ``need.device``.
    """
    free, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    shared = driver.device.integrated
    room = free if shared else driver.free_bytes()
    if need.device > room or need.host + need.device * shared > free + swap:
        raise UserError(
            f"building an engine of {name} needs about {need.host / 1e9:.1f} GB, and {need.device / 1e9:.1f} GB for the GPU; "
            f"{free / 1e9:.1f} GB, {swap / 1e9:.1f} GB of swap and {room / 1e9:.1f} GB for the GPU are free; add swap, close "
            "the desktop (sudo init 3), use a lower --workspace, or export with a smaller --precision"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """An engine file's size and hash. ``about`` contains the ``capacity`` and ``probes`` that the engine was built with."""

    bytes: int
    sha256: str
    about: dict[str, Any]


def read_record(plan: Path) -> Record | None:
    """Return an engine file's size, hash and build settings, or None if the engine is missing or incomplete."""
    try:
        record = Record(**json.loads(plan.with_suffix(".json").read_bytes()))
        is_ours = type(record.about["capacity"]) is int and isinstance(record.about["probes"], bool)
        return record if is_ours and plan.stat().st_size == record.bytes else None
    except (OSError, TypeError, LookupError, ValueError, RecursionError):
        return None

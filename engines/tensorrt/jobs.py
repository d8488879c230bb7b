"""What there is to build of a bundle: a job a graph, how the graph will be called, and the memory that its build takes.

Imports nothing of TensorRT's: ``edgevlm plan`` asks here too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import psutil

from edgevlm.engines.onnx_file import external_bytes, with_dimensions
from edgevlm.errors import BundleError, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import Driver
from edgevlm.runtime.graph_profiles import EngineShapes

REVISION = 1  # of how engines are built: another one makes them anew
WORKSPACE = 1 << 30  # bytes
COPIES = 3.0  # of the weights in the host's memory while an engine is made of them: our allowance, not measured
RUNTIME = 500_000_000  # bytes: a CUDA context with TensorRT's libraries: our allowance, not measured
Dims = tuple[int, ...]
Range = tuple[Dims, Dims, Dims]  # least, usual and most
USUAL_QUESTION = 64  # rows that kernels for text are chosen by

ONE, ROWS, QUESTION = "one-token", "chunk", "question"
DECODER_CALLS = (ONE, ROWS, QUESTION)  # the order of an engine's profiles


@dataclass(frozen=True, slots=True)
class CallShapes:
    """One kind of call of a graph: the least, usual and largest shape of each input that has dimensions to give."""

    name: str
    inputs: Mapping[str, Range]


def decoder_calls(bundle: Bundle, capacity: int) -> list[CallShapes]:
    """Of the ``full`` graph with ``capacity`` rows in every layer: one token, a chunk's rows, a question's rows.

    One row of logits is asked for of a chunk or a token, up to as many as there are of a question. No call has more rows than
    the memory.
    """
    spec, given = bundle.decoder, _shapes(bundle)
    shapes = replace(given, rows=min(given.rows, capacity), question=min(given.question, capacity))
    half, width = spec.head_dim // 2, spec.row_width
    usual = min(USUAL_QUESTION, shapes.question)
    sizes: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
        ONE: ((1, 1, 1), (1, 1, 1)),
        ROWS: ((1, shapes.rows, shapes.rows), (1, 1, 1)),
        QUESTION: ((1, usual, shapes.question), (1, 1, shapes.question)),
    }
    calls = []
    for name, (rows, logits) in sizes.items():
        inputs = {
            "inputs_embeds": _range(rows, _rows_of(width)),
            "cos": _range(rows, _rows_of(half)),
            "sin": _range(rows, _rows_of(half)),
            "logit_rows": _range(logits, lambda n: (n,)),
        }
        read = _range((1, capacity, capacity), lambda n: (n,))
        inputs |= {f"columns{layer}": read for layer in range(spec.layers)}
        calls.append(CallShapes(name, inputs))
    return calls


def vision_calls(bundle: Bundle) -> list[CallShapes]:
    """Of the tower: up to as many groups of frames as a chunk has."""
    vision = bundle.vision
    most = max(1, _shapes(bundle).frames // vision.group)
    frames = _range((1, most, most), lambda n: (n, 3 * vision.group, *vision.size))
    return [CallShapes("frames", {"pixel_values": frames})]


def fixed_dimensions(bundle: Bundle, capacity: int) -> dict[str, int]:
    """Symbolic dimensions that a build of the ``full`` graph gives a number: the rows of each layer's memory."""
    return {f"C{layer}": capacity for layer in range(bundle.decoder.layers)}


def pieces(rows: int, most: int) -> Iterator[slice]:
    """``rows`` rows in slices of ``most`` at the most."""
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _range(sizes: tuple[int, int, int], dims: Callable[[int], Dims]) -> Range:
    least, usual, most = sizes
    return dims(least), dims(usual), dims(most)


def _rows_of(width: int) -> Callable[[int], Dims]:
    return lambda n: (1, n, width)


def _shapes(bundle: Bundle) -> EngineShapes:
    if bundle.shapes is None:
        raise ValueError(f"{bundle.path} is of profile {bundle.profile}, which has no shapes for engines")
    return bundle.shapes


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """capacity: rows of each layer's memory; workspace: bytes that a layer may work with; force: build what is there too.

    probes: whether the decoder's engine gives queries, for policies that look at attention.
    """

    capacity: int
    workspace: int = WORKSPACE
    probes: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One graph: the bytes of its file with the memory's size in them, the path its weights lie beside, and its calls.

    dropped: outputs that its engine is made without. weights: bytes of them.
    """

    graph: str
    model: bytes
    path: str
    calls: Sequence[CallShapes]
    dropped: frozenset[str]
    weights: int
    fingerprint: str


def jobs_of(bundle: Bundle, settings: BuildSettings) -> list[BuildJob]:
    """The tower and the decoder. Raises BundleError for an invalid file."""
    spec = bundle.decoder
    probes = frozenset() if settings.probes else frozenset(f"query{layer}" for layer in range(spec.layers))
    sizes = fixed_dimensions(bundle, settings.capacity)
    return [
        _job(bundle, bundle.vision.graph, vision_calls(bundle)),
        _job(bundle, spec.graphs["full"], decoder_calls(bundle, settings.capacity), sizes, probes),
    ]


def _job(
    bundle: Bundle,
    name: str,
    calls: Sequence[CallShapes],
    sizes: dict[str, int] | None = None,
    dropped: frozenset[str] = frozenset(),
) -> BuildJob:
    path = bundle.file(name)
    try:
        model = with_dimensions(path.read_bytes(), sizes or {})
        files = external_bytes(model)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: {error}; export the checkpoint again") from None
    parts = {
        "revision": REVISION,
        "model": hashlib.sha256(model).hexdigest(),
        "files": {file: bundle.files[file].sha256 for file in sorted(files)},
        "calls": [asdict(call) for call in calls],
        "dropped": sorted(dropped),
    }
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return BuildJob(path.stem, model, str(path), calls, dropped, sum(files.values()), fingerprint)


@dataclass(frozen=True, slots=True)
class BuildNeed:
    """Bytes in the host's memory, and in the device's where that is another."""

    host: int
    device: int


def build_need(weights: int, workspace: int) -> BuildNeed:
    """The peak of building one engine, for ``weights`` bytes of weights and ``workspace`` bytes that a layer may work with.

    host = COPIES * weights + RUNTIME: the weights as they are read from the file, the builder's own copy, and the engine that
    is written. device = weights + workspace: the weights while kernels are timed, and what these work with.
    """
    return BuildNeed(round(COPIES * weights) + RUNTIME, weights + workspace)


def check_memory(name: str, need: BuildNeed, driver: Driver) -> None:
    """Raise UserError, one line that says what to change, where a build of graph ``name`` would not fit in the free memory.

    On a Jetson host and device share their memory, and the host's part may lie in swap.
    """
    free, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    if driver.device.integrated and need.device > free:
        raise UserError(
            f"an engine of {name} takes about {need.device / 1e9:.1f} GB of memory to build that cannot lie in swap, and "
            f"{free / 1e9:.1f} GB are free; close the desktop (sudo init 3), give a lower --workspace, or export with a "
            "smaller --precision"
        )
    if driver.device.integrated:
        short = need.host + need.device > free + swap
        wanted, there = need.host + need.device, free + swap
        where = f"are free, {swap / 1e9:.1f} of them swap"
    elif need.device > (on_device := driver.free_bytes()):
        short, wanted, there, where = True, need.device, on_device, f"are free on {driver.device.name}"
    else:
        short, wanted, there, where = need.host > free + swap, need.host, free + swap, "are free with swap"
    if short:
        raise UserError(
            f"an engine of {name} takes about {wanted / 1e9:.1f} GB to build and {there / 1e9:.1f} GB {where}; add swap, close "
            "the desktop (sudo init 3), give a lower --workspace, or export with a smaller --precision"
        )

"""What there is to build of a bundle: a job a graph, with a fingerprint of everything that its engine depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from edgevlm.engines.onnx_file import external_bytes, with_dimensions
from edgevlm.engines.tensorrt.shapes import CallShapes, decoder_calls, fixed_dimensions, projection_calls, vision_calls
from edgevlm.errors import BundleError
from edgevlm.runtime.bundle import Bundle

REVISION = 1  # of how engines are built: another one makes them anew
WORKSPACE = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """capacity: rows of each layer's memory; workspace: bytes that a layer may work with; force: build what is there too.

    probes: whether the decoder's engine gives queries, for policies that look at attention.
    """

    capacity: int
    workspace: int = WORKSPACE
    probes: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class Job:
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


def jobs_of(bundle: Bundle, settings: Settings) -> list[Job]:
    """The tower, the decoder and, where there is one, the graph of projections. Raises BundleError for a file that is none."""
    spec = bundle.decoder
    probes = frozenset() if settings.probes else frozenset(f"query{layer}" for layer in range(spec.layers))
    sizes = fixed_dimensions(bundle, settings.capacity)
    jobs = [
        _job(bundle, bundle.vision.graph, vision_calls(bundle)),
        _job(bundle, spec.graphs["whole"], decoder_calls(bundle, settings.capacity), sizes, probes),
    ]
    if "projections" in spec.graphs:
        jobs.append(_job(bundle, spec.graphs["projections"], projection_calls(bundle)))
    return jobs


def _job(
    bundle: Bundle,
    name: str,
    calls: Sequence[CallShapes],
    sizes: dict[str, int] | None = None,
    dropped: frozenset[str] = frozenset(),
) -> Job:
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
    return Job(path.stem, model, str(path), calls, dropped, sum(files.values()), fingerprint)

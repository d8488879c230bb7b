"""Profiles: what kind of graphs a bundle holds, named by the first TensorRT version that takes them.

docs/internals/engines.md has their inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.errors import UserError

ONNXRUNTIME = "onnxruntime"
TENSORRT_10_3 = "tensorrt-10.3"
TENSORRT_10_15 = "tensorrt-10.15"
PROFILES = (ONNXRUNTIME, TENSORRT_10_3, TENSORRT_10_15)  # oldest first


@dataclass(frozen=True, slots=True)
class EngineShapes:
    """The largest calls that engines of a bundle are made for.

    frames: of the vision graph, a multiple of a tower's group. rows: of a decoder call that appends frames. question: of one
    that appends text. A longer call is made in pieces.
    """

    frames: int
    rows: int
    question: int


def profile_for(tensorrt: str | None) -> str:
    """The profile for a TensorRT version, ``10.16``, or for ONNX Runtime, None. Raises UserError for one older than 10.3."""
    if tensorrt is None:
        return ONNXRUNTIME
    wanted = _version(tensorrt)
    fitting = [name for name in PROFILES if name != ONNXRUNTIME and _version(name.removeprefix("tensorrt-")) <= wanted]
    if not fitting:
        raise UserError(f"TensorRT {tensorrt} is too old: graphs are written for 10.3 and newer; upgrade JetPack")
    return fitting[-1]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))

"""Define the kinds of graphs that a bundle may have, called profiles. Each TensorRT profile is named after the first TensorRT
version that accepts its graphs. docs/internals/engines.md lists the graphs' inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.errors import UserError, nearest

ONNXRUNTIME = "onnxruntime"
TENSORRT_10_3 = "tensorrt-10.3"
TENSORRT_10_15 = "tensorrt-10.15"
PROFILES = (ONNXRUNTIME, TENSORRT_10_3, TENSORRT_10_15)
TOWERS = {ONNXRUNTIME: ("fp32", "int8"), TENSORRT_10_3: ("fp32", "fp16"), TENSORRT_10_15: ("fp32", "fp16")}


@dataclass(frozen=True, slots=True)
class EngineShapes:
    """The largest calls that a bundle's engines accept; longer calls are split into pieces.

    ``frames``: the number of frames in a vision call, a multiple of the tower's group. ``rows``: the number of rows in a
    decoder call that appends frames. ``question``: the number of rows in a decoder call that appends text.
    """

    frames: int
    rows: int
    question: int


def profile_for(tensorrt: str | None) -> str:
    """Return the profile for a TensorRT version such as ``10.16``; None stands for ONNX Runtime. Raises UserError for versions
    before 10.3.
    """
    if tensorrt is None:
        return ONNXRUNTIME
    wanted = _version(tensorrt)
    fitting = [name for name in PROFILES if name != ONNXRUNTIME and _version(name.removeprefix("tensorrt-")) <= wanted]
    if not fitting:
        raise UserError(f"TensorRT {tensorrt} is too old: version 10.3 or newer is required; upgrade JetPack")
    return fitting[-1]


def check_profile(name: str) -> None:
    """Raise UserError for an unknown profile; the message names the nearest profile."""
    if name not in PROFILES:
        raise UserError(f"unknown profile {name!r}; {nearest(name, PROFILES)}")


def vision_precision(profile: str, wanted: str | None, precision: str) -> str:
    """Return the vision tower's precision, by default the one that suits the decoder's ``precision``. Raises UserError if the
    profile does not support the precision ``wanted``.
    """
    check_profile(profile)
    chosen = wanted or ("fp16" if profile != ONNXRUNTIME and precision != "fp32" else "fp32")
    if chosen not in TOWERS[profile]:
        raise UserError(f"--vision-precision {chosen!r} is not supported for {profile}; use {' or '.join(TOWERS[profile])}")
    return chosen


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))

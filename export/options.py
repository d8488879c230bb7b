"""Define the options of an export, and a fingerprint of everything that determines its bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.export.checkpoint import snapshot_of
from edgevlm.runtime.bundle import FORMAT
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.kv import KVType

_LARGE = 64 << 20
Samples = Mapping[str, NDArray[np.floating]]  # matrix layer{l}.{qkv,output,gate_up,down} -> rows of its input, [n, in]


@dataclass(frozen=True, slots=True)
class ActivationSampler:
    """Samples a decoder's activations when ``sample(folder)`` is called. ``source``: identifies the sampled input."""

    source: str
    sample: Callable[[Path], Samples]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of :func:`edgevlm.export.export_checkpoint`.

    ``st_spattn_from``: the first layer that prefills frames sparsely for PureKV's ST-SpAttn; by default layer 3, or a shallower
        model's last layer.
    ``camera``: the (height, width) of the frames to watch. Families that keep a frame's aspect ratio are exported for the
        camera's aspect ratio; frames of any other shape are stretched.
    ``precision``: the precision of the decoder's weights, see :mod:`edgevlm.export.precisions`. AWQ and GPTQ checkpoints keep
        their rounding (int4-zp); for other checkpoints, the default is fp32.
    ``samples``: samples of the matrices' inputs for rounding by GPTQ, or an :class:`ActivationSampler`.
    ``vision_precision``: the precision of the vision tower's linears: fp32 or int8 for ONNX Runtime, fp32 or fp16 for TensorRT.
        For TensorRT, the default is fp32 if ``precision`` is fp32, and fp16 otherwise.
    ``kv``: the type of cached keys and values. An export to int8 runs the new bundle in ONNX Runtime to measure the scales.
    ``profile``: the graph profile, one of :data:`edgevlm.runtime.graph_profiles.PROFILES`.
    ``positions``: how positions continue after a Qwen2-VL or Qwen2.5-VL video: as in training (``trained``) or as in
        ``transformers``.
    ``family``: the class that reads the checkpoint, by name or as ``./file.py:Class``; by default the class for ``model_type``.
    """

    st_spattn_from: int | None = None
    camera: tuple[int, int] = (480, 640)
    precision: str | None = None
    samples: Samples | ActivationSampler | None = None
    vision_precision: str | None = None
    kv: KVType = "fp16"
    profile: str = ONNXRUNTIME
    positions: str = "trained"
    family: str | None = None

    def facts(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return facts | {"samples": self.samples.source if isinstance(self.samples, ActivationSampler) else self.samples or {}}


def fingerprint(folder: Path, options: dict[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of everything that determines a bundle's bytes.

    Small files in ``folder`` are identified by their content; weights and other large files by name, size and modification
    time. A snapshot of the Hugging Face Hub is identified by its commit. Raises UserError if a file cannot be read.
    """
    try:
        files = [snapshot_of(folder)]
        if files == [None]:
            visible = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
            files = [_file(path) for path in visible]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from None
    settings = {name: _hashed(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    parts = [FORMAT, __version__, _exporter(), settings, files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _hashed(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for name, array in arrays.items()}


def _file(path: Path) -> Any:
    facts = path.stat()
    if path.suffix == ".safetensors" or facts.st_size >= _LARGE:
        return path.name, facts.st_size, facts.st_mtime_ns
    return path.name, hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _exporter() -> str:
    """Return the SHA-256 of the exporter's source files, so that any change to the exporter changes the fingerprint."""
    files = sorted(path for path in Path(__file__).parent.rglob("*") if path.suffix in (".py", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

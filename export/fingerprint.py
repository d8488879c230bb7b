"""What an export depends on, as one key: the checkpoint's files, the options, and the programs that write the bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.export.checkpoint import snapshot_of
from edgevlm.runtime.bundle import FORMAT

_WRITERS = ("onnx",)
_MEASURERS = ("onnxruntime", "onnxruntime-gpu")  # what scales and samples are measured with
_LARGE = 64 << 20  # bytes; files as large are known by size and time


def fingerprint(folder: Path, options: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of all that decides the bytes of a bundle.

    ``folder``: small files by their content, weights and other large ones by name, size and time of change; a snapshot of the
    Hugging Face Hub by its commit. ``options``: JSON values; a path stands for the file there, arrays by name for their bytes.
    Raises UserError for what cannot be read.
    """
    try:
        snapshot = snapshot_of(folder)
        files = [list(snapshot)] if snapshot else [_file(path) for path in sorted(folder.iterdir()) if _counts(path)]
        settings = {name: _setting(value) for name, value in options.items()}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); give a file that can") from None
    programs = {name: _version(name) for name in (*_WRITERS, *(_MEASURERS if _is_measured(options) else ()))}
    parts = [FORMAT, __version__, programs, _exporter(), settings, files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _is_measured(options: Mapping[str, Any]) -> bool:
    """Whether something in the bundle comes from running the model."""
    return options.get("kv") == "int8" or isinstance(options.get("samples"), str)


def _setting(value: Any) -> Any:
    if isinstance(value, Path):
        return _file(value)
    if isinstance(value, Mapping):
        return {name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for name, array in value.items()}
    return value


def _counts(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _file(path: Path) -> list[Any]:
    facts = path.stat()
    if path.suffix == ".safetensors" or facts.st_size >= _LARGE:
        return [path.name, facts.st_size, facts.st_mtime_ns]
    return [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _exporter() -> str:
    """The exporter's own files, so that a bundle of a changed one is not taken for the new one's."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()

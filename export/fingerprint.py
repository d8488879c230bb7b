"""What an export depends on, as one key: the checkpoint's files, the options, and the programs that write the bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.export.checkpoint import snapshot_of
from edgevlm.runtime.bundle import FORMAT

_LARGE = 64 << 20  # bytes; files as large are known by size and time


def fingerprint(folder: Path, options: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of all that decides the bytes of a bundle.

    ``folder``: small files by their content, weights and other large ones by name, size and time of change; a snapshot of the
    Hugging Face Hub by its commit. ``options``: JSON values; arrays by name stand for their bytes.
    Raises UserError for what cannot be read.
    """
    try:
        files = [snapshot_of(folder)]
        if files == [None]:
            visible = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
            files = [_file(path) for path in visible]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); give a file that can") from None
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
    """The exporter's own files, so that a bundle of a changed one is not taken for the new one's."""
    files = sorted(path for path in Path(__file__).parent.rglob("*") if path.suffix in (".py", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

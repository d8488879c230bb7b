"""What was measured of a model into its bundle: the old bundle or the new one is there, whole, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from edgevlm.errors import UserError
from edgevlm.runtime.atomic import check_target, published
from edgevlm.runtime.bundle import MANIFEST, Bundle, hash_file, seal_manifest
from edgevlm.runtime.calibration import CALIBRATION, Calibration
from edgevlm.runtime.choices import CHOICES, Choices
from edgevlm.runtime.kv import SCALES, KVScales


def check_writable(bundle: Bundle, out: Path | None) -> None:
    """Raise UserError, one line, where :func:`write_calibration` could not write; cheap, so ask before long work."""
    if out is not None:
        check_target(out, force=False)
        return
    folder = bundle.path.resolve()
    if not all(os.access(place, os.W_OK | os.X_OK) for place in (folder, folder.parent)):
        raise UserError(f"{folder}: is read-only; give --out DIR, and a calibrated copy is written there")


def write_calibration(
    bundle: Bundle,
    calibration: Calibration | None = None,
    choices: Choices | None = None,
    scales: KVScales | None = None,
    *,
    out: Path | None = None,
) -> Path:
    """Write what was measured and list it in ``bundle.json``, in the bundle or, with ``out``, in a copy; returns which.

    ``calibration.json`` and the ``scales`` of an int8 cache stay as they are where none are given. Older choices go: they were
    made on other numbers.

    In place the new bundle is a second folder of hard links that changes places with the old one in one step, so that the
    weights are not copied and whoever reads the old ones goes on. Raises UserError if the bundle has changed since ``bundle``
    was loaded, and for every failure to write.
    """
    source = bundle.path.resolve()
    target = source if out is None else out
    with published(target, force=out is None) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, symlinks=True, copy_function=_link if out is None else shutil.copy2)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["files"] != {name: asdict(record) for name, record in bundle.files.items()}:
            raise UserError(f"{source}: has changed while it was measured; calibrate it again")
        if calibration is not None:
            _put(folder, CALIBRATION, calibration.to_json(), manifest["files"])
        if choices is not None:
            _put(folder, CHOICES, choices.to_json(), manifest["files"])
        elif manifest["files"].pop(CHOICES, None):
            (folder / CHOICES).unlink()
        if scales is not None:
            (folder / SCALES).unlink()
            scales.save(folder / SCALES)
            manifest["files"][SCALES] = asdict(hash_file(folder / SCALES))
        _write(folder / MANIFEST, seal_manifest(manifest))
        written = Bundle.load(folder, verify="size")
        written.calibration(), written.choices()
    return target


def _put(folder: Path, name: str, raw: bytes, records: dict[str, object]) -> None:
    _write(folder / name, raw)
    records[name] = asdict(hash_file(folder / name))


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write(path: Path, raw: bytes) -> None:
    """Write a new file in the place of what may be a link to the old bundle's."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)

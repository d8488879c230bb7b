"""Keep measurements in a checkpoint folder while calibration runs, then write them into the bundle."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import MANIFEST, Bundle, check_target, hash_file, seal_manifest
from edgevlm.runtime.calibration import CALIBRATION, CHOICES, EVIDENCE, Calibration, Choices, EvidenceHeads
from edgevlm.runtime.files import atomic_directory, reason
from edgevlm.runtime.kv import SCALES, KVScales
from edgevlm.runtime.model import Model


@contextmanager
def checkpoint_folder(target: Path, settings: Mapping[str, object]) -> Iterator[Path]:
    """Yield a folder next to ``target`` that keeps the measurements of an interrupted run with the same ``settings``.

    The folder is removed when the ``with`` block succeeds. Raises UserError if the folder is in use or cannot be created.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = target.parent / f".{target.name}.calibrating-{digest[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{target}: another process is calibrating it; wait for it to finish") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another --out") from None
    try:
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        name, why = error.filename or folder, reason(error, target.parent)
        raise UserError(f"{name}: cannot be read or written ({why}); then run the same command to continue") from None
    finally:
        with suppress(OSError):
            folder.rmdir()  # rmdir succeeds only if the folder is empty
        os.close(lock)


def check_writable(bundle: Bundle, out: Path | None) -> None:
    """Raise UserError if :func:`write_calibration` could not write its files. Call this function before you measure."""
    if out is not None:
        check_target(out, force=False)
        return
    folder = bundle.path.resolve()
    if not all(os.access(place, os.W_OK | os.X_OK) for place in (folder, folder.parent)):
        raise UserError(f"{folder}: is read-only; add --out DIR to write a calibrated copy")


def write_calibration(
    bundle: Bundle,
    calibration: Calibration | None = None,
    choices: Choices | None = None,
    scales: KVScales | None = None,
    evidence: EvidenceHeads | None = None,
    *,
    out: Path | None = None,
) -> Path:
    """Write measurements into the bundle, or into a copy in ``out``, and return the folder.

    Measurements that are not given stay in the bundle, with one exception: the old ``choices`` are removed if ``calibration``
    or ``scales`` come without new ones. Without ``out``, weights are not copied: a folder of hard links replaces
    the bundle's folder. Raises UserError if the files have changed since ``bundle`` was loaded, or if a file cannot be written.
    """
    source = bundle.path.resolve()
    target = source if out is None else out
    with atomic_directory(target, partial(check_target, force=out is None)) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, symlinks=True, copy_function=_link if out is None else shutil.copy2)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["files"] != {name: asdict(record) for name, record in bundle.files.items()}:
            raise UserError(f"{source}: changed during calibration; calibrate it again")
        for name, part in ((CALIBRATION, calibration), (CHOICES, choices), (EVIDENCE, evidence)):
            if part is not None:
                _write(folder / name, part.to_json())
                manifest["files"][name] = asdict(hash_file(folder / name))
        if choices is None and (calibration or scales) and manifest["files"].pop(CHOICES, None):
            (folder / CHOICES).unlink()
        if scales is not None:
            (folder / SCALES).unlink()
            scales.save(folder / SCALES)
            manifest["files"][SCALES] = asdict(hash_file(folder / SCALES))
        _write(folder / MANIFEST, seal_manifest(manifest))
        written = Bundle.load(folder, verify="size")
        written.calibration(), written.choices(), written.evidence_heads()
    return target


def _link(source: str, target: str) -> None:
    try:  # not every file system has hard links
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write(path: Path, raw: bytes) -> None:
    """Replace a file. Other hard links to it keep the old content."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBundle(Bundle):
    """A bundle with new measurements in memory. A measurement that is None is read from the files."""

    measured: Calibration | None
    scales: KVScales | None
    evidence: EvidenceHeads | None

    def calibration(self) -> Calibration | None:
        return self.measured or Bundle.calibration(self)

    def kv_scales(self) -> KVScales | None:
        return self.scales or Bundle.kv_scales(self)

    def evidence_heads(self) -> EvidenceHeads:
        return self.evidence or Bundle.evidence_heads(self)


def as_calibrated(
    model: Model, calibration: Calibration | None = None, scales: KVScales | None = None, evidence: EvidenceHeads | None = None
) -> Model:
    """Return a copy of the model with the given calibration, scales and evidence heads. The copy shares the model's engine."""
    parts = {field.name: getattr(model.bundle, field.name) for field in fields(Bundle)}
    return replace(model, bundle=MeasuredBundle(**parts, measured=calibration, scales=scales, evidence=evidence))

"""Bundles made once of a checkpoint and kept: ``EDGEVLM_CACHE``, else ``edgevlm/bundles`` in the user's cache folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgevlm.bench import writing
from edgevlm.errors import BundleError, UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import checkpoint_folder
from edgevlm.export.fingerprint import fingerprint
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.paths import look

Tell = Callable[[str], object]
DEFAULTS: dict[str, Any] = {
    "st_spattn_from": None,
    "camera": (480, 640),
    "text_gguf": None,
    "precision": None,
    "vision_precision": "fp32",
    "kv": "fp32",
}


def cache_folder() -> Path:
    """Where bundles are kept."""
    if own := os.environ.get("EDGEVLM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgevlm" / "bundles"


def bundle_of(model: str, progress: Tell, notice: Tell) -> str:
    """What ``--model`` means: ``demo`` and bundles as they are, a checkpoint's folder as the bundle kept of it."""
    folder = Path(model)
    if model == "demo" or look(folder) != "folder" or (folder / MANIFEST).exists() or not (folder / "config.json").exists():
        return model
    return str(kept_bundle(folder, progress, notice))


def kept_bundle(
    checkpoint: Path, progress: Tell, notice: Tell, *, force: bool = False, scaled: bool = False, **options: Any
) -> Path:
    """The kept bundle of a checkpoint with these options of ``export_checkpoint``; exported if it is not there, or by force.

    scaled: by :func:`edgevlm.apps.scaling.export_scaled`.

    Raises UserError as they do.
    """
    folder, options = checkpoint_folder(checkpoint), DEFAULTS | options
    key = fingerprint(folder, options | {"scaled": scaled})
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip(".-")[:64] or "checkpoint"
    target = cache_folder() / f"{name}-{key[:16]}"
    with _alone(target, notice):
        if force or not _is_whole(target):
            command = writing("edgevlm.apps.scaling").export_scaled if scaled else export_checkpoint
            command(folder, target, progress=progress, notice=notice, force=True, **options)
    return target


def list_bundles(as_json: bool) -> Iterator[str]:
    """A line for each bundle that is kept: its name, family, size and folder."""
    for folder in _kept():
        with suppress(BundleError):
            bundle = Bundle.load(folder, verify="size")
            size = sum(record.bytes for record in bundle.files.values())
            facts = {"bundle": folder.name, "family": bundle.family, "bytes": size, "path": str(folder)}
            yield json.dumps(facts) if as_json else f"{folder.name}  {bundle.family}  {size / 1e6:.0f} MB  {folder}"


def remove_bundles(name: str) -> list[Path]:
    """Remove a kept bundle, or ``all`` of them and what exports left unfinished; returns what is gone. Raises UserError."""
    folders = _kept() if name == "all" else [folder for folder in _kept() if folder.name == name]
    if not folders and name != "all":
        raise UserError(f"no bundle {name!r} is kept in {cache_folder()}; edgevlm bundles lists them")
    if name == "all":
        folders += [path for path in cache_folder().glob(".*.edgevlm-*") if not _in_use(path)]
    for folder in folders:
        shutil.rmtree(folder)
    return folders


def _kept() -> list[Path]:
    return sorted(path.parent for path in cache_folder().glob(f"*/{MANIFEST}"))


def _is_whole(target: Path) -> bool:
    try:
        Bundle.load(target, verify="size")
    except BundleError:
        return False
    return True


def _in_use(folder: Path) -> bool:
    """Whether an export that runs holds the lock of its unfinished folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def _alone(target: Path, notice: Tell) -> Iterator[None]:
    """Of several processes that want the same bundle one makes it, and the others wait for it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target.with_name(f".{target.name}.lock"), os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        where = f"{target.parent}: bundles cannot be kept there ({error.strerror})"
        raise UserError(f"{where}; name another folder in EDGEVLM_CACHE, or use edgevlm export --out") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice("another process is exporting this checkpoint; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile holds the file open too
        os.close(handle)

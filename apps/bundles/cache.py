"""The cache of exported bundles, in ``EDGEVLM_CACHE`` or else in the user's cache directory."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from edgevlm.apps.schemas import json_line
from edgevlm.errors import BundleError, UserError
from edgevlm.export.checkpoint import ConfigOnly, checkpoint_folder
from edgevlm.export.options import fingerprint
from edgevlm.export.prequantised import stored_in
from edgevlm.packages import needed
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.files import home, lock_file
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, vision_precision
from edgevlm.runtime.helper_process import call_in_helper
from edgevlm.runtime.model import bundle_folder

DIGITS = 10  # number of digits of each of the two hashes in a cached bundle's name
DEFAULTS: dict[str, Any] = {
    "st_spattn_from": None, "camera": (480, 640), "precision": None, "vision_precision": None, "kv": "fp16",
    "profile": ONNXRUNTIME, "positions": "trained", "gptq": False,
}  # fmt: skip


def cache_folder() -> Path:
    if own := os.environ.get("EDGEVLM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "edgevlm" / "bundles"


def cached_bundle(checkpoint: Path, progress: Notify, notify: Notify, *, force: bool = False, **options: Any) -> Path:
    """Return a checkpoint's cached bundle; export it if it is missing or ``force`` is true. ``options`` override DEFAULTS."""
    target = cached_path(checkpoint, **options)
    with locked(target, "another process is exporting this checkpoint; waiting for it", notify):
        if force or not is_complete(target):
            export_apart(checkpoint, target, progress=progress, notify=notify, **DEFAULTS | options | {"force": True})
            size = sum(record.bytes for record in Bundle.load(target, verify="size").files.values())
            notify(f"the bundle takes {size / 1e6:,.0f} MB in {target}; run edgevlm bundles remove {target.name} to free them")
    return target


def export_apart(checkpoint: Path, out: Path, *, progress: Notify, notify: Notify, **options: Any) -> None:
    """Call :func:`edgevlm.export.export_checkpoint` in a separate process. Raises UserError."""
    call_in_helper(f"{__name__}:export_here", checkpoint, out, progress=progress, notify=notify, **options)


def export_here(checkpoint: str, out: str, *, gptq: bool, camera: list[int], **options: Any) -> None:
    module, name = ("edgevlm.apps.bundles.gptq", "export_by_gptq") if gptq else ("edgevlm.export", "export_checkpoint")
    getattr(needed(module, "exporting"), name)(Path(checkpoint), Path(out), camera=tuple(camera), **options)


def cached_path(checkpoint: Path, **options: Any) -> Path:
    """Return the path of a checkpoint's cached bundle with these options. Raises UserError if the checkpoint does not exist."""
    folder, options = checkpoint_folder(checkpoint), DEFAULTS | options
    options["precision"] = stored_in(ConfigOnly(folder).config, options["precision"])
    options["vision_precision"] = vision_precision(options["profile"], options["vision_precision"], options["precision"])
    options["samples"] = needed("edgevlm.apps.bundles.gptq", "exporting").source() if options.pop("gptq") else {}
    name = plain_name(ConfigOnly(folder).name)
    return cache_folder() / f"{name}-{fingerprint(folder, {})[:DIGITS]}-{fingerprint(folder, options)[:DIGITS]}"


def plain_name(text: str) -> str:
    """Turn a text into the first part of a cached bundle's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip(".-")[:64] or "checkpoint"


def list_bundles(as_json: bool) -> Iterator[str]:
    """Yield a line for each cached bundle: name, family, precisions, size and path."""
    for folder in cached():
        with suppress(BundleError):
            bundle = Bundle.load(folder, verify="size")
            size, spec = sum(record.bytes for record in bundle.files.values()), bundle.decoder
            stored = {"precision": spec.precision, "rounding": spec.rounding, "kv": spec.kv}
            stored |= {"vision_precision": bundle.vision.precision, "profile": bundle.profile}
            facts = {"bundle": folder.name, "family": bundle.family, **stored, "bytes": size, "path": str(folder)}
            text = f"{folder.name}  {bundle.family}  {description(bundle)}  {size / 1e6:.0f} MB  {folder}"
            yield json_line("bundle", facts) if as_json else text


def description(bundle: Bundle) -> str:
    """Describe the export options that differ between bundles of one checkpoint."""
    spec = bundle.decoder
    rounding = "" if spec.rounding == "nearest" else f" by {spec.rounding}"
    target = "" if bundle.profile == ONNXRUNTIME else f", for {bundle.profile}"
    return f"{spec.precision} weights{rounding}, {spec.kv} cache, {bundle.vision.precision} tower{target}"


def remove_bundles(name: str) -> list[Path]:
    """Remove a cached bundle, or ``all`` bundles and unfinished exports; return the removed paths. Raises UserError."""
    folders = [folder for folder in cached() if name in ("all", folder.name)]
    if not folders and name != "all":
        raise UserError(f"bundle {name!r} not found in {cache_folder()}; run edgevlm bundles list")
    for folder in cache_folder().glob(".*.edgevlm-*") if name == "all" else ():
        handle = os.open(folder, os.O_RDONLY)
        with suppress(BlockingIOError):  # a running export keeps its unfinished folder locked
            lock_file(handle)
            folders.append(folder)
        os.close(handle)
    for folder in folders:
        shutil.rmtree(folder)
    return folders


def verify(bundles: list[str], progress: Report) -> Iterator[tuple[str, bool]]:
    """Check every byte of bundles, by default of all cached ones. Yield a line about each bundle and whether it is intact."""
    for folder in [find(each) for each in bundles] or cached():
        try:
            loaded = Bundle.load(folder, progress=progress)
            if loaded.profile == ONNXRUNTIME:
                import_module("edgevlm.engines.inputs").check_graphs(loaded)
            yield f"{folder}: {len(loaded.files)} files match {MANIFEST}", True
        except BundleError as error:
            yield str(error), False


def find(bundle: str) -> Path:
    """Return a bundle's folder. ``bundle``: ``demo``, a path, or a name in the cache."""
    kept = cache_folder() / bundle
    return kept if not Path(bundle).exists() and (kept / MANIFEST).exists() else bundle_folder(bundle)


def cached() -> list[Path]:
    return sorted(path.parent for path in cache_folder().glob(f"*/{MANIFEST}"))


def is_complete(target: Path) -> bool:
    try:
        return bool(Bundle.load(target, verify="size"))
    except BundleError:
        return False


@contextmanager
def locked(made: Path, waiting: str, notify: Notify) -> Iterator[None]:
    """Hold a lock while the block runs, so that only one process makes a file or folder. Raises UserError.

    ``made``: the file or folder to make; the lock is a file next to it.
    ``waiting``: the message for ``notify`` if another process holds the lock.
    """
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        file = open(made.with_name(f".{made.name}.lock"), "a")  # noqa: SIM115
    except OSError as error:
        how = "set EDGEVLM_CACHE (bundles) or HF_HOME (checkpoints) to another folder"
        raise UserError(f"{made.parent}: cannot be written ({error.strerror}); {how}") from None
    with file:
        try:
            lock_file(file)
        except BlockingIOError:
            notify(waiting)
            lock_file(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock_file(file, fcntl.LOCK_UN)  # unlock explicitly, because a forked process may hold the file open

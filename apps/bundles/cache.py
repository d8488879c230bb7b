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

from edgevlm.errors import BundleError, UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import ConfigOnly, checkpoint_folder
from edgevlm.export.fingerprint import fingerprint
from edgevlm.packages import needed
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.paths import look, refuse_address
from edgevlm.runtime.plugins import load_class

Tell = Callable[[str], object]
OPTIONS = 10  # digits of a kept bundle's name that stand for its options; as many before them for the checkpoint
DEFAULTS: dict[str, Any] = {
    "st_spattn_from": None,
    "camera": (480, 640),
    "text_gguf": None,
    "precision": None,
    "vision_precision": None,
    "kv": "fp32",
    "profile": ONNXRUNTIME,
}


def cache_folder() -> Path:
    """Where bundles are kept."""
    if own := os.environ.get("EDGEVLM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgevlm" / "bundles"


def bundle_of(model: str, progress: Tell, notice: Tell, engine: str = DEFAULT_ENGINE) -> str:
    """What ``--model`` means: ``demo`` and bundles as they are, a checkpoint's folder as the bundle kept of it.

    That is the one of default options where it is kept and ``engine`` runs it, else the one that is kept and run by it; where
    none is, the default one is exported. Raises UserError where several others are kept, where the engine does not run what
    would be exported, and as :func:`kept_bundle`.
    """
    refuse_address(model)
    folder = Path(model)
    if model == "demo" or look(folder) != "folder" or (folder / MANIFEST).exists() or not (folder / "config.json").exists():
        return model
    wanted = place(folder, scaled=False)
    of_it = [path for path in _kept() if path.name.startswith(wanted.name[:-OPTIONS])]
    backend = load_class("engines", engine)
    hint = getattr(backend, "export_hint", "")  # of engines that do not run what is exported by default
    others = [] if not hint and _is_whole(wanted) else [path for path in of_it if _is_whole(path) and _runs(path, backend)]
    if len(others) > 1:
        named = "; ".join(f"{path} ({described(path)})" for path in others)
        raise UserError(f"{model}: several bundles are kept of it; give one of them as --model: {named}")
    if others:
        notice(f"{others[0].name}: the bundle kept of this checkpoint, {described(others[0])}")
        return str(others[0])
    if hint:
        raise UserError(f"{model}: no bundle that {engine} runs is kept of it; make one: {hint.format(model)}")
    return str(kept_bundle(folder, progress, notice))


def kept_bundle(
    checkpoint: Path, progress: Tell, notice: Tell, *, force: bool = False, scaled: bool = False, **options: Any
) -> Path:
    """The kept bundle of a checkpoint with these options of ``export_checkpoint``; exported if it is not there, or by force.

    scaled: by :func:`edgevlm.apps.bundles.awq.export_scaled`.

    Raises UserError as they do.
    """
    target = place(checkpoint, scaled=scaled, **options)
    with _alone(target, notice):
        if force or not _is_whole(target):
            command = needed("edgevlm.apps.bundles.awq", "exporting").export_scaled if scaled else export_checkpoint
            command(checkpoint, target, progress=progress, notice=notice, force=True, **DEFAULTS | options)
    return target


def place(checkpoint: Path, *, scaled: bool, **options: Any) -> Path:
    """Where the bundle of a checkpoint with these options is kept, by what the checkpoint holds and by what they come to.

    Raises UserError for a folder that is no checkpoint.
    """
    folder, options = checkpoint_folder(checkpoint), DEFAULTS | options
    stored_in = needed("edgevlm.export.prequantised", "reading a checkpoint").stored_in
    profile = needed("edgevlm.export.profiles", "reading a checkpoint").load_profile(options["profile"])
    options["precision"] = stored_in(ConfigOnly(folder).config, options["text_gguf"], options["precision"])
    options["vision_precision"] = profile.vision_precision(options["vision_precision"], options["precision"])
    of_checkpoint = fingerprint(folder, {})[:OPTIONS]
    of_options = fingerprint(
        folder, options | {"samples": needed("edgevlm.apps.bundles.awq", "exporting").source() if scaled else {}}
    )[:OPTIONS]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip(".-")[:64] or "checkpoint"
    return cache_folder() / f"{name}-{of_checkpoint}-{of_options}"


def list_bundles(as_json: bool) -> Iterator[str]:
    """A line for each bundle that is kept: its name, family, precisions, size and folder."""
    for folder in _kept():
        with suppress(BundleError):
            bundle = Bundle.load(folder, verify="size")
            size = sum(record.bytes for record in bundle.files.values())
            facts = {"bundle": folder.name, "family": bundle.family, **precisions(bundle), "bytes": size, "path": str(folder)}
            said = f"{folder.name}  {bundle.family}  {described(folder)}  {size / 1e6:.0f} MB  {folder}"
            yield json.dumps(facts) if as_json else said


def precisions(bundle: Bundle) -> dict[str, str | None]:
    """What a bundle keeps its numbers as: the options of its export that tell it from others of the same checkpoint."""
    spec = bundle.decoder
    stored = {"precision": spec.precision, "scaling": spec.scaling, "kv": spec.kv, "vision_precision": bundle.vision.precision}
    return stored | {"profile": bundle.profile}


def described(folder: Path) -> str:
    """The same in words."""
    known = precisions(Bundle.load(folder, verify="size"))
    scaling = f" by {known['scaling']}" if known["scaling"] else ""
    target = "" if known["profile"] == ONNXRUNTIME else f", for {known['profile']}"
    return f"{known['precision']} weights{scaling}, {known['kv']} cache, {known['vision_precision']} tower{target}"


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


def _runs(folder: Path, backend: Any) -> bool:
    """Whether an engine's class takes a kept bundle."""
    bundle = Bundle.load(folder, verify="size")
    return bool(backend.takes(bundle)) if hasattr(backend, "takes") else bundle.profile == ONNXRUNTIME


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

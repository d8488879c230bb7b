"""A folder that appears whole or not at all: built beside its place, flushed, then renamed over it in one step."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import MANIFEST
from edgevlm.runtime.paths import look

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_SPACE = 1 << 20  # bytes: what may be left of a disk that a block no longer fits on
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file grew too large",
}


@contextmanager
def published(out_dir: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``out_dir``; when the block ends well it becomes ``out_dir``.

    An existing bundle is replaced only with ``force`` and only then, in one step; anything else that exists is never
    touched. What a killed run left behind is removed by the next. Raises UserError for every failure to write.
    """
    target = Path(os.path.abspath(out_dir))
    check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        folder = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    except OSError as error:
        raise UserError(f"{target.parent}: cannot be written ({reason(error, target.parent)}); choose another --out") from None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
        os.chmod(folder, 0o777 & ~_umask())
        for path in (*folder.iterdir(), folder):
            flush(path)
        check_target(target, force)
        _replace(folder, target)
        flush(target.parent)
    except OSError as error:
        raise UserError(
            f"{target}: the bundle could not be written ({reason(error, target.parent)}); nothing was changed"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after an exchange this is the bundle that was replaced
        os.close(lock)


@contextmanager
def beside(out_dir: str | Path) -> Iterator[Path]:
    """Yield a folder beside ``out_dir`` for what a bundle is made from; it goes at the end, a killed run's with the next."""
    target = Path(os.path.abspath(out_dir))
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_target(out_dir: str | Path, force: bool) -> None:
    """Raise UserError if a bundle must not be put at ``out_dir``; cheap, so ask before long work."""
    target = Path(os.path.abspath(out_dir))
    found = look(target)
    if found == "nothing" and not target.is_symlink():
        return
    if found != "folder":
        raise UserError(f"{target}: is a file; choose another --out")
    if (target / MANIFEST).exists():
        if not force:
            raise UserError(f"{target}: a bundle is there already; pass --force to replace it")
    elif any(target.iterdir()):
        raise UserError(f"{target}: is a folder with something else in it; choose another --out")


def _prefix(target: Path) -> str:
    return f".{target.name}.edgevlm-"


def _remove_abandoned(target: Path) -> None:
    """Remove temporary folders of this target whose writer is gone: nobody holds their lock."""
    for path in target.parent.glob(f"{_prefix(target)}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _replace(folder: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(folder, target)
    elif not _exchange(folder, target):  # a file system without exchange: a moment without either
        old = folder.with_name(f"{folder.name}.old")
        os.rename(target, old)
        os.rename(folder, target)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders atomically (Linux ``renameat2``); False where it cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return bool(call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def flush(path: Path) -> None:
    """See a file or folder onto the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def reason(error: OSError, place: Path) -> str:
    """Why, in words. Some writers pass no reason on: ask while what was written is still there how full the disk is."""
    if error.errno is None and shutil.disk_usage(place).free < _NO_SPACE:
        return _FULL[errno.ENOSPC]
    return _FULL.get(error.errno or 0, error.strerror or str(error))

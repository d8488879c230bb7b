"""A folder that appears whole or not at all: built beside its place, flushed, then renamed over it in one step.

It is built in ``.NAME.edgevlm-.../bundle``. With a key, beside it lie that key and a journal of what is finished, so that the
next run with the same key goes on where this one was stopped or killed.
"""

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
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import MANIFEST
from edgevlm.runtime.paths import look

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_SPACE = 1 << 20  # bytes: what may be left of a disk that a block no longer fits on
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file grew too large",
}


_BUNDLE, _KEY, _JOURNAL = "bundle", "key", "journal"


@contextmanager
def atomic_directory(
    out_dir: str | Path,
    *,
    force: bool = False,
    key: str | None = None,
    keep: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    notify: Notify | None = None,
) -> Iterator[Path]:
    """Yield a folder of its own; when the block ends well it becomes ``out_dir``.

    An existing bundle is replaced only with ``force`` and only then, in one step; anything else that exists is never
    touched. What a killed run left behind is removed by the next, or, where both have the same ``key``, yielded as it was left:
    :func:`journal_of` then says what is finished. With a key, a block that ends with one of ``keep`` leaves its folder.
    ``notify`` is told of both. Raises UserError for every failure to write.
    """
    target, notify = Path(os.path.abspath(out_dir)), notify or (lambda _: None)
    check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work, lock = _left_behind(target, key, notify) or _new(target, key)
    except OSError as error:
        raise UserError(f"{target.parent}: cannot be written ({reason(error, target.parent)}); choose another --out") from None
    folder, kept = work / _BUNDLE, False
    try:
        yield folder
        os.chmod(folder, 0o777 & ~_umask())
        for path in (*folder.iterdir(), folder):
            flush(path)
        check_target(target, force)
        _replace(folder, target)
    except keep:
        kept = key is not None
        if kept:
            notify("stopped; the same command goes on from here")
        raise
    except OSError as error:
        raise UserError(
            f"{target}: the bundle could not be written ({reason(error, target.parent)}); nothing was changed"
        ) from None
    else:
        try:
            flush(target.parent)
        except OSError as error:
            raise UserError(f"{target}: was written, but a power cut may undo it ({reason(error, target.parent)})") from None
    finally:
        if not kept:
            shutil.rmtree(work, ignore_errors=True)  # after an exchange it holds the bundle that was replaced
        os.close(lock)


def journal_of(folder: Path) -> Path:
    """Where what is finished of a folder that :func:`atomic_directory` yielded is noted.

    Beside it is a folder for what the files are made from; it is removed on commit.
    """
    return folder.with_name(_JOURNAL)


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


def _new(target: Path, key: str | None) -> tuple[Path, int]:
    """A work folder, and its handle, which holds its lock."""
    work = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    lock = os.open(work, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (work / _BUNDLE).mkdir()
    if key is not None:
        (work / _KEY).write_text(key)
    return work, lock


def _left_behind(target: Path, key: str | None, notify: Notify) -> tuple[Path, int] | None:
    """A work folder of the same key whose writer is gone: nobody holds its lock. Others like it are removed."""
    found: tuple[Path, int] | None = None
    for work in sorted(target.parent.glob(f"{_prefix(target)}*")):
        with suppress(OSError):
            lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found is None and _is_of(work, key):
                    found, lock = (work, lock), -1
                    continue
                if (work / _BUNDLE).is_dir() and _has_begun(work):
                    notify("what an export of other settings, or of another checkpoint, left unfinished is thrown away")
                shutil.rmtree(work, ignore_errors=True)
            finally:
                if lock >= 0:
                    os.close(lock)
    if found is not None and _has_begun(found[0]):
        notify("going on with what an export that was stopped has finished")
    return found


def _is_of(work: Path, key: str | None) -> bool:
    """Whether a work folder was made with this key and got as far as having a folder to write into."""
    with suppress(OSError):
        return key is not None and (work / _BUNDLE).is_dir() and (work / _KEY).read_text() == key
    return False


def _has_begun(work: Path) -> bool:
    """Whether anything lies in a work folder that is worth going on from."""
    return any(path.name not in (_BUNDLE, _KEY) for path in work.iterdir())


def _replace(folder: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(folder, target)
        return
    done = folder.with_name("done")  # under its own name the bundle that was replaced would be gone on with
    os.rename(folder, done)
    if not _exchange(done, target):  # a file system without exchange: a moment without either
        os.rename(done, folder)
        os.rename(target, old := folder.with_name("old"))
        try:
            os.rename(folder, target)
        except OSError:
            os.rename(old, target)
            raise


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

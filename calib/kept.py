"""A folder that keeps what has been measured until the whole of it can be written."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from edgevlm.errors import UserError


@contextmanager
def kept(target: Path, settings: Mapping[str, object]) -> Iterator[Path]:
    """Yield a folder beside ``target`` that is the same one whenever the settings are, and with what was put there.

    It goes when the block ends well, with those of other settings that nobody is working in. ``settings`` are all that what is
    kept depends on. Raises UserError where another process is at work in it, and where it cannot be made.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = target.parent / f"{_prefix(target)}{digest[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); give another --out") from None
    if not _locked(lock):
        os.close(lock)
        raise UserError(f"{target}: another process is calibrating it; wait for its end")
    try:
        yield folder
        for other in target.parent.glob(f"{_prefix(target)}*"):
            _remove_unless_in_use(other, folder)
    finally:
        with suppress(OSError):
            folder.rmdir()  # if nothing was kept
        os.close(lock)


def _prefix(target: Path) -> str:
    return f".{target.name}.calibrating-"


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unless_in_use(folder: Path, own: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        if folder == own or _locked(handle):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)

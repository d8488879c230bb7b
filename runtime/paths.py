"""What lies at a path a user gave, asked so that every failure is one line."""

from __future__ import annotations

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Literal

from edgevlm.errors import UserError

PRIVATE = os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags of :func:`os.open` for what a camera has seen, with mode 0o600: a link that somebody put there is not followed."""

Found = Literal["file", "folder", "other", "nothing"]


_ADDRESS = re.compile(r"(?i)[a-z][a-z0-9+.-]+:/")  # a Path has folded the second slash


def refuse_address(path: str | Path) -> None:
    """Raise UserError for what is an address and not a path, without repeating it: it may hold a password."""
    if _ADDRESS.match(str(path)) and look(path) == "nothing":
        raise UserError("a model is a folder, or ORG/NAME on the Hugging Face hub, and no address; give one of these")


def private_folder(path: Path) -> None:
    """Make a folder that is missing, and those above it, for the user alone. Raises OSError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def look(path: str | Path) -> Found:
    """What lies at ``path``, links followed.

    Raises UserError, with the system's reason, where that cannot be said: below a folder that may not be searched, or for a
    name longer than names can be.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be looked at ({getattr(error, 'strerror', error)}); give another path") from None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def open_file(path: str | Path) -> BufferedReader:
    """``path`` to be read, links followed. Raises OSError, for a pipe, a device or a folder too: none is waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no file")
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is no file")
    return stream

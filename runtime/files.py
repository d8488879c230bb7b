"""Write files and folders that appear whole or not at all, write JSON lines that survive a kill, and check users' paths."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO

from edgevlm.errors import UserError
from edgevlm.progress import Notify

if TYPE_CHECKING:
    from typing_extensions import Self

UNFINISHED = ".unfinished"
PRIVATE = os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags for :func:`os.open`, used with mode 0o600 for files of what a camera has seen: links are not followed."""

Found = Literal["file", "folder", "other", "nothing"]

_ADDRESS = re.compile(r"(?i)[a-z][a-z0-9+.-]+:/")  # a single slash is enough, because Path turns ``//`` into ``/``
_NO_SPACE = 1 << 20
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file grew too large",
}
_FOLDER, _KEY, _JOURNAL, _OLD = "bundle", "key", "journal", "old"


def look(path: str | Path) -> Found:
    """Return the kind of file at a path, following links. Raises UserError if the file system cannot read the path."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', error)}); give another path") from None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def is_utf8(path: str | Path) -> bool:
    """Return whether a path is valid UTF-8. Python represents other bytes as lone surrogates, which few libraries accept."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_utf8(path: str | Path) -> None:
    """Raise UserError for a model path that is not UTF-8, because some libraries cannot open it."""
    if not is_utf8(path):
        raise UserError(f"{path}: the name is not UTF-8; rename it, or link to it (ln -s) under another name")


def refuse_address(path: str | Path) -> None:
    """Raise UserError for a URL. The message does not repeat the URL, because it may hold a password."""
    if _ADDRESS.match(str(path)) and look(path) == "nothing":
        raise UserError("a model cannot be a URL; give a folder, or ORG/NAME on the Hugging Face hub")


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading, following links. Raises OSError for any other kind of file, without blocking."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a file")
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "not a file")
    return stream


def home() -> Path:
    """Return the user's home folder. Raises UserError if the user has none, as in a container without a user name."""
    try:
        found = Path.home()
    except RuntimeError:
        found = Path()
    if not found.is_absolute():
        raise UserError("this user has no home folder; set HOME, or --state for a server and EDGEVLM_CACHE for bundles")
    return found


def private_folder(path: Path) -> None:
    """Make a missing folder and its missing parents, accessible only to the user. Raises OSError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def refuse_unmapped(path: Path, error: Exception) -> None:
    """Raise UserError if an error shows that the file system cannot map files, as on some FUSE, 9p and network mounts."""
    if isinstance(error, OSError) and "No such device" in str(error):
        raise UserError(f"{path}: its file system cannot map files into memory; copy the folder to a local disk") from None


def reason(error: OSError, place: Path) -> str:
    """Describe why writing failed. If hardly any space is free, an error without ``errno`` means a full disk."""
    if error.errno is None and shutil.disk_usage(place).free < _NO_SPACE:
        return _FULL[errno.ENOSPC]
    return _FULL.get(error.errno or 0, error.strerror or str(error))


def flush(path: Path) -> None:
    """Flush a file or folder to the disk. Raises OSError.

    Does nothing for a folder on a file system that flushes only files, such as CIFS and vboxsf, which return EINVAL.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces the file at ``path`` only if the ``with`` block succeeds. Raises OSError.

    Only one process at a time may write ``path``. A killed process leaves a file whose name ends in UNFINISHED.
    """
    unfinished, flags, mode = path.with_name(path.name + UNFINISHED), PRIVATE if private else 0, 0o600 if private else 0o666
    try:
        with open(unfinished, "wb", opener=lambda name, wanted: os.open(name, wanted | flags, mode)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    flush(path.parent)


@contextmanager
def atomic_directory(
    out_dir: str | Path,
    check: Callable[[Path], object],
    *,
    key: str | None = None,
    keep: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    notify: Notify = lambda _: None,
) -> Iterator[Path]:
    """Yield an empty folder next to ``out_dir``. If the ``with`` block succeeds, that folder becomes ``out_dir``.

    ``check`` is called at the start and before the replacement; it raises UserError if ``out_dir`` must not be replaced. With a
    ``key``, the folder is kept if the ``with`` block is killed or ends with an error in ``keep``. The next call with this
    ``key`` yields the same folder again. The journal at :func:`journal_of` lists the folder's finished files. Folders left by
    calls with another ``key`` are removed. Raises UserError for every failure to write. If the process is killed between the
    two renames, ``out_dir`` is missing. :func:`put_back` then restores the old folder, in the next call or when the bundle is
    loaded.
    """
    check_utf8(target := Path(os.path.abspath(out_dir)))
    put_back(target)
    check(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work, lock = _work_folder(target, key, notify)
    except OSError as error:
        raise UserError(f"{target.parent}: cannot be written ({reason(error, target.parent)}); choose another --out") from None
    folder, kept = work / _FOLDER, False
    try:
        yield folder
        for path in (*folder.iterdir(), folder):
            flush(path)
        check(target)
        _replace(folder, target)
    except keep:
        kept = key is not None
        if kept:
            notify("stopped; run the same command to continue")
        raise
    except OSError as error:
        raise UserError(
            f"{target}: the bundle could not be written ({reason(error, target.parent)}); nothing was changed; "
            "free up space, or choose another folder with EDGEVLM_CACHE or export --out"
        ) from None
    else:
        try:
            flush(target.parent)
        except OSError as error:
            raise UserError(f"{target}: was written, but a power cut may undo it ({reason(error, target.parent)})") from None
    finally:
        if not kept:
            shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def put_back(target: Path) -> None:
    """Move back the old folder if a process was killed while replacing ``target``. Wait for a replacement in progress."""
    if os.path.lexists(target):
        return
    for old in target.parent.glob(f"{_prefix(target)}*/{_OLD}"):
        with suppress(OSError), _locked(old.parent, fcntl.LOCK_EX):
            if not os.path.lexists(target):
                os.rename(old, target)


def journal_of(folder: Path) -> Path:
    """Return the path of the journal next to a folder that :func:`atomic_directory` yielded."""
    return folder.with_name(_JOURNAL)


def _prefix(target: Path) -> str:
    return f".{target.name}.edgevlm-"


def lock_file(file: int | BinaryIO | TextIO, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Lock a file for this process. Return False if the disk does not support locks, as some network disks do not.

    Raises BlockingIOError if another process holds the lock, and OSError for any other failure.
    """
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_file(handle, how)
        yield handle
    finally:
        os.close(handle)


def _work_folder(target: Path, key: str | None, notify: Notify) -> tuple[Path, int]:
    found: tuple[Path, int] | None = None
    for work in sorted(target.parent.glob(f"{_prefix(target)}*")):
        with suppress(OSError), _locked(work, fcntl.LOCK_EX | fcntl.LOCK_NB) as lock:
            folder, begun = work / _FOLDER, any(path.name not in (_FOLDER, _KEY) for path in work.iterdir())
            if found is None and folder.is_dir() and (work / _KEY).exists() and (work / _KEY).read_text() == key:
                found = work, os.dup(lock)
                if begun:
                    notify("continuing the export that was stopped")
                continue
            if begun and folder.is_dir():
                notify("discarding an unfinished export with different settings or of another checkpoint")
            shutil.rmtree(work, ignore_errors=True)
    if found is None:
        work = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        with _locked(work, fcntl.LOCK_EX) as lock:
            (work / _FOLDER).mkdir()
            if key is not None:
                (work / _KEY).write_text(key)
            found = work, os.dup(lock)
    return found


def _replace(folder: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(folder, target)
        return
    shutil.rmtree(old := folder.with_name(_OLD), ignore_errors=True)
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(old, target)
        raise


class JsonLines:
    """A file of JSON lines that only grows, written by one process, so that a stopped run can continue.

    The first line is the header, if there is one. An incomplete last line, left by a killed process, is dropped. ``records``
    maps keys to values, including those of earlier runs. If no ``key`` is given, ``records`` is empty.
    """

    def __init__(
        self,
        path: Path | None,
        header: dict[str, Any] | None = None,
        key: Callable[[Any], Any] | None = None,
        *,
        resume: bool = True,
        sync: bool = False,
    ) -> None:
        """Open or create ``path``. If ``path`` is None, keep the records only in memory.

        ``header``: names the file's kind (``journal``) and all settings that its records depend on. ``key``: a function that
        returns a record's key; if it raises LookupError or TypeError, the record is invalid. ``sync``: flush each record to the
        disk before :meth:`add` returns. Raises UserError for a file that cannot be written, is open in another process, is
        damaged or has a different header. Without ``resume``, any existing file raises UserError. If an error is raised, the
        file stays unchanged.
        """
        self.path, self.records, self._key, self._sync = path, dict[Any, Any](), key, sync
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            self._file = open(path, "ab")  # noqa: SIM115
            lock_file(self._file)
            self._continue(path, header, resume)
        except (OSError, UserError) as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise UserError(f"{path}: another process is writing this file; wait for it, or choose another file") from None
            if isinstance(error, OSError):
                raise UserError(f"{path}: cannot be written ({error.strerror}); choose another file") from None
            raise

    def _continue(self, path: Path, header: dict[str, Any] | None, resume: bool) -> None:
        raw = path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if raw and not resume:
            raise UserError(f"{path}: already exists; add --resume to continue it, or choose another file")
        if header is not None and _line(header).startswith(raw):
            os.truncate(path, 0)  # the file is empty or holds part of the header
            self._write(header)
            return
        try:
            lines = _parse(raw[:whole])
            if header is not None and (found := lines.pop(0)) != header:
                if not isinstance(found, dict) or found.get("journal") != header.get("journal"):
                    raise LookupError("first line")
                other = [name for name in {**header, **found} if found.get(name) != header.get(name)]
                differences = ", ".join(f"{name} {found.get(name)} there, {header.get(name)} now" for name in other)
                raise UserError(f"{path}: was written with different settings ({differences}); choose another file")
            if self._key is not None:
                self.records = {self._key(record): record for record in lines}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            kind = header["journal"] if header else "JSON lines"
            raise UserError(f"{path}: is damaged or not a {kind} journal ({error}); choose another file") from None
        os.truncate(path, whole)

    def add(self, record: Any) -> None:
        """Append a JSON value. Raises OSError."""
        if self._key is not None:
            self.records[self._key(record)] = record
        self._write(record)

    def _write(self, value: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(_line(value))
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Close the file, so that another process may write to it."""
        if self._file is not None and not self._file.closed:
            lock_file(self._file, fcntl.LOCK_UN)  # a forked process with the file open would keep the lock
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path, *, finite: bool = False) -> list[Any]:
    """Return the values in a file of JSON lines. Empty lines and a last line that a kill cut short are skipped.

    ``finite``: reject NaN and infinities. Raises OSError, or a ValueError that names the first line that is not JSON.
    """
    return _parse(path.read_bytes(), finite=finite)


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _parse(raw: bytes, *, finite: bool = False) -> list[Any]:
    strict: Any = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    found = []
    for number, text in enumerate(raw.split(b"\n"), start=1):
        try:
            if text.strip():
                found.append(json.loads(text, **strict))
        except (ValueError, RecursionError):
            if number <= raw.count(b"\n"):
                raise ValueError(f"line {number}: not valid JSON") from None
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value

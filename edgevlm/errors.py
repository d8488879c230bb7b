"""The errors that edgevlm raises."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_LONGEST = 1500  # maximum characters in a message
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class UserError(Exception):
    """An error that the user can fix. The command line prints the error's message in one line and exits with status 2.

    The message names the problem and what to do next. Control characters in the message are replaced by blanks, and the
    middle of a long message is left out.
    """

    def __init__(self, message: object) -> None:
        line = _CONTROL.sub(" ", str(message))
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} .. {line[-_LONGEST // 2 :]}")


def is_fault(error: BaseException) -> bool:
    """Return whether an error is an Exception or a Rust panic, which pyo3 derives from BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class NoThreads(UserError):
    """The system does not let this process start more threads."""

    def __init__(self) -> None:
        super().__init__("no more threads can be started; raise ulimit -u, docker's --pids-limit or systemd's TasksMax")

    @staticmethod
    def is_in(error: BaseException) -> bool:
        """Return whether an error from Python or ONNX Runtime means that a thread could not be started."""
        return any(words in str(error) for words in ("can't start new thread", "pthread_create"))


class FieldError(UserError):
    """A field of a request, or a setting, is invalid."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}")
        self.field = field


class BundleError(UserError):
    """A bundle is missing, damaged, or in a version that this edgevlm cannot read."""


class SourceError(UserError):
    """A camera or file cannot be opened or read."""


class SourceRefused(SourceError):
    """A camera refuses the connection because the password is wrong or the stream is unknown. Do not retry."""


class SnapshotError(UserError):
    """A snapshot is incomplete, damaged, or in a format that this edgevlm cannot read."""


class CacheError(RuntimeError):
    """A caller misused the KV cache; the cache is unchanged."""


class CacheFull(CacheError):
    """The requested rows do not fit in the cache's fixed capacity."""


def refuse_fork(pid: int, what: str) -> None:
    """Raise UserError in a forked process, where the threads of ``what`` are missing.

    ``pid``: the id of the process that opened ``what``.
    """
    if pid != os.getpid():
        raise UserError(f"{what} was opened before this process was forked; open it here, or start processes with 'spawn'")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word, such as ``did you mean 'x'?`` or ``choose from a, b``."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}" if names else "none is available"


def reason(message: str) -> str:
    """Return a validation message without pydantic's prefix."""
    return message.removeprefix("Value error, ")


def first_problem(error: ValidationError) -> str:
    """Return a short text that says where and why a value breaks its schema."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = max((each for each in found if each["loc"][:1] == found[0]["loc"][:1]), key=lambda each: len(each["loc"]))
    fields = (str(part) for part in first["loc"] if not re.search(r"\[|constrained-", str(part)))  # omits a union's variants
    where, why = ".".join(fields)[:120], reason(first["msg"])[:120]
    return f"{where}: {why}" if where else why

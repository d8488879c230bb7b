"""Errors that edgevlm raises; every folder imports them."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: one line on stderr, exit status 2, never a traceback.

    The message says what is wrong and what to do next.
    """


class FieldError(UserError):
    """A field of a request, or a setting, that is wrong."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}")
        self.field = field


class BundleError(UserError):
    """A bundle is missing, damaged, or of another version."""


class SourceError(UserError):
    """A camera or file cannot be opened or read."""


class SourceRefused(SourceError):
    """A camera answered and will give the same answer again: a wrong password, no such stream."""


class SnapshotError(UserError):
    """A snapshot is torn, damaged, or of another format."""


class CacheError(RuntimeError):
    """Misuse of the KV cache by code; raised before a byte is changed."""


class CacheFull(CacheError):
    """The rows asked for do not fit in the capacity fixed at start."""


def nearest(word: str, known: Iterable[str]) -> str:
    """End of a message about an unknown word: ``did you mean 'x'?``, or ``there are: a, b`` where nothing is near."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"

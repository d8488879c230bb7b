"""Errors that edgevlm raises, and nothing else, so that every folder can import them."""


class UserError(Exception):
    """Something the user can mend: shown as one line, exit code 2, never a traceback.

    The message says what is wrong and what to do next.
    """


class BundleError(UserError):
    """A bundle is missing, damaged, or of another version."""


class SourceError(UserError):
    """A camera or file cannot be opened or read."""


class SnapshotError(UserError):
    """A snapshot is torn, damaged, or of another format."""


class CacheError(RuntimeError):
    """Misuse of the KV cache by code; raised before a byte is changed."""


class CacheFull(CacheError):
    """The rows asked for do not fit in the capacity fixed at start."""

"""The process title, which every user of the machine can read (``ps``): no credential is left in it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from edgevlm.apps.sources.base import mask_credentials

ARGUMENTS = slice(45, 47)  # of /proc/self/stat after the name: arg_start and arg_end, proc(5) fields 48 and 49


def mask_title() -> None:
    """Overwrite the credentials among this process's arguments, as the kernel shows them; where it cannot be done, nothing."""
    with suppress(OSError, ValueError):
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[ARGUMENTS])
        if not 0 < start < end:
            return
        shown = ctypes.string_at(start, end - start)
        arguments = [mask_credentials(part.decode(errors="surrogateescape")) for part in shown.split(b"\0")]
        masked = "\0".join(arguments).encode(errors="surrogateescape")
        if masked != shown:
            ctypes.memmove(start, masked[: end - start].ljust(end - start, b"\0"), end - start)

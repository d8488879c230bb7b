"""Choose the default number of threads per call."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def default_threads() -> int:
    """Return the number of physical cores that this process may use."""
    allowed = physical = psutil.cpu_count(logical=False) or 1
    with suppress(AttributeError, OSError):  # the system lacks the call, or a sandbox forbids it
        allowed = len(os.sched_getaffinity(0))
    return max(1, min(physical, allowed))

"""How many threads a call has unless told otherwise."""

from __future__ import annotations

import os

import psutil


def default_threads() -> int:
    """Physical cores that this process may use."""
    physical = psutil.cpu_count(logical=False) or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))

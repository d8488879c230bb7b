"""The clock of every bench."""

import time
from collections.abc import Callable


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)

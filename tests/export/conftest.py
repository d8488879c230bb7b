"""``checkpoints``, ``runner``, ``fixtures`` and ``reference_decoder`` can be imported by name, wherever tests run from."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fixtures import exported  # noqa: E402

__all__ = ["exported"]

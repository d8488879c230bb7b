"""The same tiny checkpoints as the export tests use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "export"))
from fixtures import exported

__all__ = ["exported"]

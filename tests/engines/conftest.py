"""The same tiny bundles as the export tests use, and TensorRT without TensorRT."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "export"))
sys.path.insert(0, str(Path(__file__).parent))
from fixtures import exported

__all__ = ["exported"]

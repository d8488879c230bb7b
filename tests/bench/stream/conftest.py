"""Tiny checkpoints and their bundles."""

from fixtures import exported

__all__ = ["exported"]

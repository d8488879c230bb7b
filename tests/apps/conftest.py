"""Fixtures of the exporter's tests."""

from fixtures import exported

__all__ = ["exported"]

"""Snapshots of a session on disk, and continuing from them after a power cut. docs/internals/snapshots.md has the format."""

from edgevlm.runtime.snapshots.writer import SnapshotWriter

__all__ = ["SnapshotWriter"]

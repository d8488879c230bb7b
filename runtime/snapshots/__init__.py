"""Write snapshots of a session to disk, and resume from them after a power cut. docs/internals/snapshots.md has the format."""

from edgevlm.runtime.snapshots.writer import SnapshotWriter

__all__ = ["SnapshotWriter"]

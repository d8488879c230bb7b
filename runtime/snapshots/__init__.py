"""Write snapshots of a session to disk, and resume from them after a power cut. Format: docs/internals/snapshots.md."""

from edgevlm.runtime.snapshots.writer import SnapshotWriter

__all__ = ["SnapshotWriter"]

"""The terminal of a run: its display and its input."""

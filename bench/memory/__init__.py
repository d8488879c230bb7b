"""``edgevlm bench memory``: long runs, snapshots, stores and retrieval."""

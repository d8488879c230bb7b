"""Save benchmark results in an append-only file, and report and compare them."""

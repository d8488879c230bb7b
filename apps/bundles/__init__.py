"""Export bundles from checkpoints, cache and download bundles, and build engines from bundles."""

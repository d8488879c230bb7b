"""Bundles: export them from checkpoints, cache them, download them, and build engines from them."""

"""Bundles: made of checkpoints, kept in a cache, fitted to a device, built into its engines."""

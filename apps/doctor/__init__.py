"""Inspect this machine: checks with fixes, cameras, power."""

"""Inspect this machine: its checks with suggested fixes, its cameras and its power."""

"""Measure performance and accuracy by commands."""

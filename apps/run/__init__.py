"""Watching a stream: the run loop, its start and its end."""

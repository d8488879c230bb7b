"""Watching a stream: the run loop, what starts it and what ends it."""

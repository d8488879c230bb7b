"""The options of the larger commands."""

"""Options of larger commands."""

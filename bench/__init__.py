"""Performance and accuracy as commands."""

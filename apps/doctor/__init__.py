"""Check this machine and suggest fixes, list its cameras, and measure its power."""

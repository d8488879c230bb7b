"""The terminal of a run: what it shows and what is typed into it."""

"""``edgevlm bench accuracy``: which policy still knows what happened, at which budget. Rules: docs/internals/accuracy.md."""

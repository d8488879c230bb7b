"""``edgevlm bench accuracy``: at which budget which policy still knows what happened. Rules: docs/internals/accuracy.md."""

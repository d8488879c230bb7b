"""``edgevlm bench accuracy``: at which budget which policy still knows what happened. docs/accuracy.md has the rules."""

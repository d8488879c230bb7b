"""``edgevlm bench accuracy``: how well each policy remembers at each budget. docs/internals/accuracy.md states the rules."""

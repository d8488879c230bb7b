"""``edgevlm bench speed``: decode, prefill, vision towers, precisions and graphs, beside other runtimes."""
